# Short names for ./dev, which does the work and needs no make.
.PHONY: serve test test-fast check fmt bench cover screenshots
serve test check fmt bench cover screenshots:
	./dev $@
test-fast:
	./dev fast
