// A long list of which only the part near the window is in the document.
//
// Heights are kept by key; every item stands at its own place, so one that holds the focus can stay while the rest goes.
// There is one writer of `scrollTop`, and it is here. Where things are is known from numbers: to ask the document would make it
// lay out everything once more.

const AROUND = 14;
const NEAR_END = 48;
const GUESS = 92;
const END = 16; // below the last item

export class Feed {
  /** `make(item)` gives `{el, update(item), leave()}`. `moved` is told where the window is. */
  constructor(scroller, list, make, moved = () => {}) {
    Object.assign(this, { scroller, list, make, moved });
    this.items = [];
    this.at = new Map(); // key -> index
    this.heights = new Map();
    this.tops = new Float64Array(1);
    this.views = new Map(); // key -> view, in the document
    this.follow = true;
    this.lastTop = 0; // of the window, and how high it is
    this.high = scroller.clientHeight;
    this.sizes = new ResizeObserver((entries) => this.resized(entries));
    this.sizes.observe(scroller);
    const up = (event) => {
      if (!this.lastTop) return; // nowhere to go
      if (event.type === 'wheel' ? event.deltaY < 0 : event.type === 'touchmove' || ['ArrowUp', 'PageUp', 'Home'].includes(event.key)) this.follow = false;
    };
    for (const type of ['wheel', 'touchmove', 'keydown']) scroller.addEventListener(type, up, { passive: true });
    scroller.addEventListener('scroll', () => this.scrolled(), { passive: true });
  }

  end() {
    this.sizes.disconnect();
    for (const view of this.views.values()) view.leave?.();
  }

  set(items, setSize = items.length) {
    const anchor = this.anchor();
    this.list.hidden = !items.length; // a feed without articles is none
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

  /** The item at the top of the window, and how far it is scrolled out of it. */
  anchor() {
    if (!this.items.length) return null;
    const index = this.indexAt(this.lastTop);
    return { key: this.items[index].key, offset: this.lastTop - this.tops[index] };
  }

  settle(anchor) {
    this.measureTops();
    for (let round = 0; round < 3; round += 1) {
      this.scrollTo(anchor);
      if (!this.mount()) break;
      this.measureTops();
    }
    this.scrollTo(anchor);
    this.put();
    this.tell();
  }

  scrollTo(anchor) {
    const height = Math.round(this.total + END);
    if (this.height !== height) this.list.style.height = `${(this.height = height)}px`;
    let top = this.lastTop;
    if (this.follow) top = height - this.high;
    else if (anchor && this.at.has(anchor.key)) top = this.tops[this.at.get(anchor.key)] + anchor.offset;
    top = Math.max(0, Math.min(Math.round(top), height - this.high));
    if (Math.abs(top - this.lastTop) < 1) return;
    // Someone may be scrolling, and the news of it be on its way: moved by as much, not to a place.
    this.scroller.scrollTop = this.follow ? top : this.scroller.scrollTop + top - this.lastTop;
    this.lastTop = this.scroller.scrollTop;
  }

  get total() {
    return this.tops[this.items.length];
  }

  measureTops() {
    const n = this.items.length;
    if (this.tops.length !== n + 1) this.tops = new Float64Array(n + 1);
    const guess = this.heights.size ? this.sum / this.heights.size : GUESS;
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

  range() {
    const first = this.indexAt(this.lastTop);
    const last = this.indexAt(this.lastTop + this.high);
    return [Math.max(0, first - AROUND), Math.min(this.items.length - 1, last + AROUND)];
  }

  /** Puts what is near the window into the document; true when heights turned out otherwise. */
  mount() {
    if (!this.items.length) return false;
    const [first, last] = this.range();
    for (const [key, view] of this.views) {
      const index = this.at.get(key);
      if ((index < first || index > last) && !view.el.contains(document.activeElement)) this.unmount(key);
    }
    const fresh = [];
    for (let index = first; index <= last; index += 1) {
      const item = this.items[index];
      if (this.views.has(item.key)) continue;
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

  order() {
    const sorted = [...this.views].sort(([a], [b]) => this.at.get(a) - this.at.get(b));
    let before = null;
    for (const [, { el }] of sorted) {
      const next = before ? before.nextSibling : this.list.firstChild;
      if (el !== next) this.list.insertBefore(el, next);
      before = el;
    }
  }

  /** Everything in the document at its place. */
  put() {
    for (const [key, { el, placed }] of this.views) {
      const index = this.at.get(key);
      const top = Math.round(this.tops[index]);
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
    this.lastTop = top;
    if (this.left <= NEAR_END && down >= 0) this.follow = true;
    else if (this.left > NEAR_END && down < -1) this.follow = false;
    const anchor = this.anchor();
    if (this.mount()) this.settle(anchor);
    else {
      this.put();
      this.tell();
    }
  }

  /** How much there is below the window. */
  get left() {
    return this.total + END - this.high - this.lastTop;
  }

  tell() {
    this.moved({ left: this.left, top: this.lastTop, follow: this.follow });
  }

  toEnd() {
    this.follow = true;
    this.settle(null);
  }

  /** Brings an item into the window, with `above` pixels over it. */
  show(key, above = 80) {
    if (!this.at.has(key)) return null;
    this.follow = false;
    const anchor = { key, offset: -above };
    this.settle(anchor);
    this.settle(anchor);
    this.follow = this.left <= NEAR_END;
    return this.views.get(key)?.el ?? null;
  }

  /** The keys now inside the window. */
  seen() {
    if (!this.items.length) return [];
    return this.items.slice(this.indexAt(this.lastTop), this.indexAt(this.lastTop + this.high - 1) + 1);
  }

  isSeen(key) {
    const index = this.at.get(key);
    return this.tops[index] < this.lastTop + this.high && this.tops[index + 1] > this.lastTop;
  }
}
