// A virtual list: only the items near the viewport are in the document.
//
// Heights are cached by key. Items are positioned absolutely, so the focused item can stay while others are removed.
// Only this module writes `scrollTop`. Positions are computed, because reading them from the document forces a layout.
//
// While scrolling, a frame builds only visible items. Other near items are built in idle time.

const AROUND = 14;
const AT_ONCE = 1; // of these, per frame while scrolling
const MOST = 60; // items in the document if there is no idle time to remove some
const PIECE_MS = 3; // estimated time to build one item
const GLIDE_MS = 150; // scrolling has ended after this time without a scroll event
const NEAR_END = 48;
const GUESS = 92;
const END = 16; // pixels below the last item
const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 30, { timeRemaining: () => 0 }));

export class Feed {
  /** `make(item)` returns `{el, update(item), leave()}`. `moved` is called with the viewport's position. */
  constructor(scroller, list, make, moved = (_place) => {}) {
    this.scroller = scroller;
    this.list = list;
    this.make = make;
    this.moved = moved;
    this.items = [];
    this.at = new Map(); // key -> index
    this.heights = new Map();
    this.tops = new Float64Array(1);
    this.views = new Map(); // key -> view of an item in the document
    this.follow = true;
    this.lastTop = 0; // scroll position; `high` is the viewport's height
    this.high = scroller.clientHeight;
    this.shift = 0; // offset of all items from their computed positions
    this.glided = -Infinity; // time of the last scroll
    this.sizes = new ResizeObserver((entries) => this.resized(entries));
    this.sizes.observe(scroller);
    const up = (event) => {
      if (!this.lastTop) return; // already at the top
      if (event.type === 'wheel' ? event.deltaY < 0 : event.type === 'touchmove' || ['ArrowUp', 'PageUp', 'Home'].includes(event.key)) this.follow = false;
    };
    for (const type of ['wheel', 'touchmove', 'keydown']) scroller.addEventListener(type, up, { passive: true });
    scroller.addEventListener('scroll', () => this.scrolled(), { passive: true });
  }

  end() {
    this.over = true;
    this.sizes.disconnect();
    for (const view of this.views.values()) view.leave?.();
  }

  set(items, setSize = items.length) {
    const anchor = this.anchor();
    this.list.hidden = !items.length; // an empty element with role feed is invalid
    this.items = items;
    this.setSize = setSize;
    this.at = new Map(items.map((item, index) => [item.key, index]));
    for (const [key, view] of this.views) {
      const index = this.at.get(key);
      if (index === undefined) this.unmount(key);
      else view.update?.(items[index]);
    }
    this.settle(anchor);
  }

  /** The viewport's top, in the coordinates of `tops`. */
  get y() {
    return this.lastTop - this.shift;
  }

  /** The first visible item, and how many pixels of it are above the viewport. */
  anchor() {
    if (!this.items.length) return null;
    const index = this.indexAt(this.y);
    return { key: this.items[index].key, offset: this.y - this.tops[index] };
  }

  settle(anchor) {
    this.measureTops();
    for (let round = 0; round < 3; round += 1) {
      this.scrollTo(anchor);
      if (!this.mount(this.missing(AT_ONCE))) break;
      this.measureTops();
    }
    this.scrollTo(anchor);
    this.put();
    this.reportMove();
    this.later();
  }

  scrollTo(anchor) {
    let y = this.y;
    if (this.follow) y = this.total + END - this.high;
    else if (anchor && this.at.has(anchor.key)) y = this.tops[this.at.get(anchor.key)] + anchor.offset;
    // While the person scrolls, painted items must not move; `shift` absorbs changed heights until scrolling ends.
    this.shift = this.glides && Math.min(y, this.lastTop) > 2 * this.high ? this.lastTop - y : 0;
    const height = Math.round(this.total + END + this.shift);
    if (this.height !== height) this.list.style.height = `${(this.height = height)}px`;
    const top = Math.max(0, Math.min(Math.round(y + this.shift), height - this.high));
    if (Math.abs(top - this.lastTop) < 1) return;
    // A scroll event may be pending, so scroll by the difference and not to an absolute position.
    this.scroller.scrollTop = this.follow ? top : this.scroller.scrollTop + top - this.lastTop;
    this.lastTop = this.scroller.scrollTop;
  }

  get glides() {
    return !this.follow && performance.now() < this.glided + GLIDE_MS;
  }

  get total() {
    return this.tops[this.items.length];
  }

  measureTops() {
    const n = this.items.length;
    if (this.tops.length !== n + 1) this.tops = new Float64Array(n + 1);
    const guess = this.heights.size ? Math.round(this.sum / this.heights.size) : GUESS;
    for (let i = 0; i < n; i += 1) this.tops[i + 1] = this.tops[i] + (this.heights.get(this.items[i].key) ?? guess);
  }

  sum = 0;

  note(key, height) {
    const before = this.heights.get(key);
    if (before === height) return false;
    this.sum += height - (before ?? 0);
    this.heights.set(key, height);
    return true;
  }

  indexAt(y) {
    let low = 0;
    let high = this.items.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Indexes of the first and last visible item, extended by `around` items. */
  range(around) {
    const first = this.indexAt(this.y);
    const last = this.indexAt(this.y + this.high);
    return [Math.max(0, first - around), Math.min(this.items.length - 1, last + around)];
  }

  /** Items that are not in the document, nearest to the viewport first. */
  missing(around) {
    if (!this.items.length) return [];
    const [first, last] = this.range(around);
    const middle = this.indexAt(this.y + this.high / 2);
    return this.items.slice(first, last + 1).filter((item) => !this.views.has(item.key))
      .sort((a, b) => Math.abs(this.at.get(a.key) - middle) - Math.abs(this.at.get(b.key) - middle));
  }

  /** Adds items to the document while `goOn()`; true if a height differs from the expected one. */
  mount(items, goOn = () => true) {
    if (this.views.size > MOST) this.clear();
    const fresh = [];
    for (const item of items) {
      if (fresh.length && !goOn()) break;
      const view = this.make(item);
      this.views.set(item.key, view);
      fresh.push(item.key);
      view.el.classList.add('feed-item');
      view.el.dataset.key = item.key;
    }
    if (!fresh.length) return false;
    this.order();
    let changed = false;
    for (const key of fresh) changed = this.note(key, this.views.get(key).el.offsetHeight) || changed;
    for (const key of fresh) this.sizes.observe(this.views.get(key).el, { box: 'border-box' });
    return changed;
  }

  /** Removes items far from the viewport, but never the focused one. */
  clear() {
    const [first, last] = this.range(AROUND);
    for (const [key, view] of this.views) {
      const index = this.at.get(key);
      if ((index < first || index > last) && !view.el.contains(document.activeElement)) this.unmount(key);
    }
  }

  later() {
    this.idle ??= whenIdle((deadline) => {
      this.idle = null;
      if (!this.over && this.items.length) this.ahead(deadline);
    });
  }

  ahead(deadline) {
    this.clear();
    const missing = this.missing(AROUND);
    if (!missing.length) return;
    const anchor = this.anchor();
    if (this.mount(missing, () => deadline.timeRemaining() > PIECE_MS)) this.settle(anchor);
    else this.put();
    this.later();
  }

  order() {
    const sorted = [...this.views].sort(([a], [b]) => this.at.get(a) - this.at.get(b));
    let before = null;
    for (const [, { el }] of sorted) {
      const next = before ? before.nextSibling : this.list.firstChild;
      if (el !== next) this.list.insertBefore(el, next);
      before = el;
    }
  }

  /** Positions all items in the document. */
  put() {
    for (const [key, { el, placed }] of this.views) {
      const index = this.at.get(key);
      const top = Math.round(this.tops[index] + this.shift);
      if (placed !== top) {
        el.style.transform = `translateY(${top}px)`;
        this.views.get(key).placed = top;
      }
      if (el.ariaPosInSet !== String(index + 1)) el.setAttribute('aria-posinset', index + 1);
      if (el.ariaSetSize !== String(this.setSize)) el.setAttribute('aria-setsize', this.setSize);
    }
  }

  unmount(key) {
    const view = this.views.get(key);
    this.sizes.unobserve(view.el);
    view.leave?.();
    view.el.remove();
    this.views.delete(key);
  }

  resized(entries) {
    const anchor = this.anchor();
    let changed = false;
    for (const { target, borderBoxSize } of entries) {
      const { key } = target.dataset;
      if (target === this.scroller) {
        this.high = target.clientHeight;
        changed = true;
      } else if (this.views.get(key)?.el === target) changed = this.note(key, Math.round(borderBoxSize[0].blockSize)) || changed;
    }
    if (changed) this.settle(anchor);
  }

  scrolled() {
    const top = this.scroller.scrollTop;
    const down = top - this.lastTop;
    if (down) this.glide();
    this.lastTop = top;
    if (this.left <= NEAR_END && down >= 0) this.follow = true;
    else if (this.left > NEAR_END && down < -1) this.follow = false;
    const anchor = this.anchor();
    const missing = this.missing(AT_ONCE);
    if (this.shift && Math.min(this.y, top) < 2 * this.high || this.mount(missing)) return this.settle(anchor);
    if (missing.length) this.put();
    this.reportMove();
    this.later();
  }

  glide() {
    this.glided = performance.now();
    this.resting ??= setTimeout(() => this.rest(), GLIDE_MS);
  }

  rest() {
    this.resting = null;
    if (this.over) return;
    if (this.glides) this.resting = setTimeout(() => this.rest(), GLIDE_MS);
    else if (this.shift) this.settle(this.anchor());
  }

  /** Pixels below the viewport. */
  get left() {
    return this.total + END - this.high - this.y;
  }

  reportMove() {
    this.moved({ left: this.left, top: this.y, follow: this.follow });
  }

  toEnd() {
    this.follow = true;
    this.settle(null);
  }

  /** Scrolls to an item, with `above` pixels over it. */
  show(key, above = 80) {
    if (!this.at.has(key)) return null;
    this.follow = false;
    this.glided = -Infinity;
    const anchor = { key, offset: -above };
    this.settle(anchor);
    this.settle(anchor);
    this.follow = this.left <= NEAR_END;
    return this.views.get(key)?.el ?? null;
  }

  /** Keys of the visible items. */
  seen() {
    if (!this.items.length) return [];
    return this.items.slice(this.indexAt(this.y), this.indexAt(this.y + this.high - 1) + 1);
  }

  isSeen(key) {
    const index = this.at.get(key);
    return this.tops[index] < this.y + this.high && this.tops[index + 1] > this.y;
  }
}
