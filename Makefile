# Short names for ./dev, which does the work and needs no make.
.PHONY: serve test test-fast check fmt bench cover
serve test check fmt bench cover:
	./dev $@
test-fast:
	./dev fast
