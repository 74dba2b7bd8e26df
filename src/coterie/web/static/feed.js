// A long list of which only the part near the window is in the document.
//
// Heights are kept by key; every item stands at its own place, so one that holds the focus can stay while the rest goes.
// There is one writer of `scrollTop`, and it is here.

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
    this.lastTop = 0;
    this.sizes = new ResizeObserver((entries) => this.resized(entries));
    this.sizes.observe(scroller);
    const up = (event) => {
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
    const index = this.indexAt(this.scroller.scrollTop);
    return { key: this.items[index].key, offset: this.scroller.scrollTop - this.tops[index] };
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
    this.list.style.height = `${this.total + END}px`;
    const box = this.scroller;
    let top = box.scrollTop;
    if (this.follow) top = box.scrollHeight - box.clientHeight;
    else if (anchor && this.at.has(anchor.key)) top = this.tops[this.at.get(anchor.key)] + anchor.offset;
    if (Math.abs(top - box.scrollTop) >= 1) box.scrollTop = top;
    this.lastTop = box.scrollTop;
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
    const top = this.scroller.scrollTop;
    const first = this.indexAt(top);
    const last = this.indexAt(top + this.scroller.clientHeight);
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
    const keys = new Map([...this.views].map(([key, { el }]) => [el, key]));
    const anchor = this.anchor();
    let changed = false;
    for (const { target } of entries) {
      if (target === this.scroller) changed = true;
      else if (keys.has(target)) changed = this.note(keys.get(target), target.offsetHeight) || changed;
    }
    if (changed) this.settle(anchor);
  }

  scrolled() {
    const box = this.scroller;
    const left = box.scrollHeight - box.clientHeight - box.scrollTop;
    if (left <= NEAR_END && box.scrollTop >= this.lastTop) this.follow = true;
    else if (box.scrollTop < this.lastTop - 1 && left > NEAR_END) this.follow = false;
    this.lastTop = box.scrollTop;
    const anchor = this.anchor();
    if (this.mount()) this.settle(anchor);
    else {
      this.put();
      this.tell();
    }
  }

  tell() {
    const box = this.scroller;
    this.moved({ left: box.scrollHeight - box.clientHeight - box.scrollTop, top: box.scrollTop, follow: this.follow });
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
    return this.views.get(key)?.el ?? null;
  }

  /** The keys now inside the window. */
  seen() {
    if (!this.items.length) return [];
    const top = this.scroller.scrollTop;
    return this.items.slice(this.indexAt(top), this.indexAt(top + this.scroller.clientHeight - 1) + 1);
  }

  isSeen(el) {
    const a = el.getBoundingClientRect();
    const b = this.scroller.getBoundingClientRect();
    return a.bottom > b.top && a.top < b.bottom;
  }
}
