// The organisation: agents by parent, as a tree or as a drawing.

import { avatar, button, empty, fill, h, icon, like, s, sync } from '../dom.js';
import { t } from '../i18n.js';
import { doing, dot, family, flat, treeItem, treeKeys } from '../agents_list.js';
import { agentPath } from '../router.js';
import { on, takes } from '../state.js';
import './parts.js'; // loads the style sheet of all screens

const SHOWN = 'coterie.org';

export function render(root, { compact }) {
  const stage = h('div', { class: 'org' });
  const folded = new Set();
  let graph = !compact && localStorage.getItem(SHOWN) === 'graph';
  let current = null;

  const views = [['tree', false], ['graph', true]].map(([name, value]) =>
    button({ class: 'plain-btn', 'aria-pressed': String(graph === value), text: t(`org_${name}`), onclick: () => choose(value) }),
  );
  const choose = (value) => {
    graph = value;
    localStorage.setItem(SHOWN, graph ? 'graph' : 'tree');
    views.forEach((one, i) => one.setAttribute('aria-pressed', String(Boolean(i) === graph)));
    draw();
  };
  const tree = h('ul', { class: 'org-tree', role: 'tree', 'aria-label': t('org'), onkeydown: (event) => treeKeys(event, focus, fold) });
  const draw = () => {
    const roots = family();
    if (!roots.length) return fill(stage, empty(t('noAgents')));
    if (graph) return drawGraph(stage, roots);
    const shown = flat(roots, folded);
    if (!shown.some(({ agent }) => agent.id === current)) current = shown[0].agent.id;
    if (tree.parentNode !== stage) fill(stage, tree);
    sync(tree, shown.map(row));
    mark();
  };
  const row = (node) => {
    const { agent, kids, level } = node;
    const sign = kids.length && (folded.has(agent.id) ? '▸' : '▾');
    const turn = (event) => {
      if (!event.currentTarget.textContent) return; // without children
      event.stopPropagation();
      fold(agent.id);
    };
    const about = [agent.role, agent.description].filter(Boolean).join(' · ');
    return h(
      'li',
      { class: `org-row org-level-${Math.min(level, 8)}`, ...treeItem(node, folded) },
      h('span', { class: 'fold', 'aria-hidden': 'true', onclick: turn }, sign || null),
      avatar(agent, { sign: dot(agent) }),
      h('span', { class: 'org-name', dir: 'auto', text: agent.name }),
      h('span', { class: 'meta', text: doing(agent) }),
      agent.waiting > 0 && h('span', { class: 'tag queued', text: t('orgWaiting', { n: agent.waiting }) }),
      agent.delayed > 0 && h('span', { class: 'tag', text: t('orgDelayed', { n: agent.delayed }) }),
      capabilities(agent),
      about && h('span', { class: 'org-about meta', dir: 'auto', 'data-testid': 'about', text: about }),
    );
  };
  const mark = () => {
    for (const el of stage.querySelectorAll('[role=treeitem]')) {
      el.tabIndex = el.dataset.agent === current ? 0 : -1;
      el.setAttribute('aria-selected', String(!el.tabIndex));
    }
  };
  const focus = (id) => {
    current = id;
    mark();
    stage.querySelector('[tabindex="0"]')?.focus();
  };
  const fold = (id) => {
    if (!folded.delete(id)) folded.add(id);
    draw();
  };

  fill(root, !compact && h('div', { class: 'filters', role: 'group', 'aria-label': t('orgView') }, views), stage);
  draw();
  let planned = false;
  const soon = () => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      if (stage.isConnected) draw();
    });
  };
  return on(['agents', 'snapshot', 'agent:*'], soon);
}

function capabilities(agent) {
  const reads = takes(agent);
  const label = [t('takesIn'), reads.map((name) => t(`can_${name}`)).join(t('comma'))].join(' ');
  return h('span', { class: 'org-caps', role: 'img', 'aria-label': label, title: label }, reads.map(icon));
}

// The drawing: a parent above its children. Children without children of their own stand in a grid, so that a hundred fit.

const [WIDE, HIGH, GAP_X, GAP_Y] = [148, 52, 28, 36];
const STEP_X = WIDE + GAP_X;
const STEP_Y = HIGH + GAP_Y;
const CLOSEST = 2.5; // zoom

/** Places a list of siblings below `y`, beginning at `x`. Returns the width they take. */
function placeAll(nodes, x, y, out) {
  const leaves = nodes.filter((one) => !one.kids.length);
  let right = x;
  for (const node of nodes.filter((one) => one.kids.length)) right += placeNode(node, right, y, out);
  const columns = Math.max(1, Math.min(leaves.length, Math.max(4, Math.ceil(Math.sqrt(leaves.length * 1.8)))));
  leaves.forEach((node, n) => out.boxes.set(node.agent.id, { node, x: right + (n % columns) * STEP_X, y: y + Math.floor(n / columns) * STEP_Y }));
  if (leaves.length) right += columns * STEP_X;
  return right - x;
}

function placeNode(node, x, y, out) {
  const width = placeAll(node.kids, x, y + STEP_Y, out);
  const box = { node, x: x + (width - STEP_X) / 2, y };
  out.boxes.set(node.agent.id, box);
  for (const { agent } of node.kids) out.lines.push([box, out.boxes.get(agent.id)]);
  return width;
}

/** From the parent down, then beside the column of the child, so that no line crosses a box. */
function lineTo(from, to) {
  const start = [from.x + WIDE / 2, from.y + HIGH];
  const bus = start[1] + GAP_Y / 2;
  const isNext = to.y - from.y <= STEP_Y;
  if (isNext) return `M${start}V${bus}H${to.x + WIDE / 2}V${to.y}`;
  return `M${start}V${bus}H${to.x - GAP_X / 2}V${to.y + HIGH / 2}H${to.x}`;
}

let view = null; // what is seen of the drawing, kept while the person looks at it

function drawGraph(stage, roots) {
  const out = { boxes: new Map(), lines: [] };
  placeAll(roots, 0, 0, out);
  const boxes = [...out.boxes.values()];
  const all = { w: Math.max(...boxes.map((one) => one.x)) + WIDE, h: Math.max(...boxes.map((one) => one.y)) + HIGH };
  const svg = s('svg', { class: 'graph', role: 'group', 'aria-label': t('org') });
  for (const [parent, child] of out.lines) svg.append(s('path', { class: 'edge', d: lineTo(parent, child) }));
  for (const one of boxes) svg.append(nodeOf(one));
  const before = stage.querySelector('.graph-frame');
  if (before) {
    before.frame.again(svg, all);
    return;
  }
  view = null;
  fill(stage, frameOf(svg, all));
}

const STILL = 6; // pixels that a pointer may move during a click

/** A frame that shows the drawing: fitted at first; wheel, drag, fingers, keys and buttons zoom and move it. */
function frameOf(svg, firstSize) {
  let all = firstSize;
  const zoomBy = (name, factor, label) => button({ class: 'plain-btn', 'data-testid': `zoom-${name}`, onclick: () => zoom(factor) }, label);
  const tools = h('div', { class: 'graph-tools', role: 'group', 'aria-label': t('zoom') }, zoomBy('out', 1.25, t('zoomOut')), zoomBy('in', 0.8, t('zoomIn')),
    button({ class: 'plain-btn', 'data-testid': 'zoom-fit', onclick: () => fit() }, t('zoomFit')));
  const box = h('div', { class: 'graph-frame', tabindex: '0', role: 'region', 'aria-label': t('org') }, svg);
  const el = h('div', { class: 'graph-stage' }, tools, box);
  const pixels = () => [Math.max(1, box.clientWidth), Math.max(1, box.clientHeight)];

  const put = () => {
    svg.setAttribute('viewBox', [view.x, view.y, view.w, view.h].map((n) => Math.round(n * 10) / 10).join(' '));
    box.classList.toggle('is-fitted', Boolean(view.fitted)); // then a finger scrolls the page
  };
  function fit() {
    const [width, height] = pixels();
    const scale = Math.max((all.w + GAP_X * 2) / width, (all.h + GAP_Y) / height, 1);
    view = { w: width * scale, h: height * scale };
    Object.assign(view, { x: (all.w - view.w) / 2, y: scale > 1 ? (all.h - view.h) / 2 : -GAP_Y / 2, fitted: true });
    put();
  }
  function zoom(factor, at = [0.5, 0.5]) {
    const [width] = pixels();
    const w = Math.min(Math.max(view.w * factor, width / CLOSEST), Math.max(all.w * 2, width * 2));
    const by = w / view.w;
    view = { x: view.x + view.w * (1 - by) * at[0], y: view.y + view.h * (1 - by) * at[1], w, h: view.h * by };
    put();
  }
  function move(x, y) {
    view = { ...view, x: view.x + x, y: view.y + y, fitted: false };
    put();
  }

  box.addEventListener('wheel', (event) => {
    event.preventDefault();
    const { left, top } = box.getBoundingClientRect();
    const [width, height] = pixels();
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.1 : 0.9, [(event.clientX - left) / width, (event.clientY - top) / height]);
    else move((event.deltaX * view.w) / width, (event.deltaY * view.w) / width);
  }, { passive: false });
  const held = new Map(); // pointer -> its position
  let far = 0; // that the pointers have moved since the first press
  box.addEventListener('pointerdown', (event) => {
    if (event.button) return;
    if (!held.size) far = 0;
    held.set(event.pointerId, [event.clientX, event.clientY]);
    if (event.pointerType === 'touch') return;
    event.preventDefault(); // a link is not dragged away
    box.focus({ preventScroll: true });
  });
  box.addEventListener('pointermove', (event) => {
    const [x, y] = held.get(event.pointerId) ?? [];
    if (x === undefined || !event.buttons) return held.delete(event.pointerId);
    const to = [event.clientX, event.clientY];
    held.set(event.pointerId, to);
    far += Math.hypot(to[0] - x, to[1] - y);
    const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const [width, height] = pixels();
    if (other) {
      const { left, top } = box.getBoundingClientRect();
      const apart = (one) => Math.max(1, Math.hypot(one[0] - other[0], one[1] - other[1]));
      zoom(apart([x, y]) / apart(to), [(other[0] - left) / width, (other[1] - top) / height]);
    } else if (event.pointerType !== 'touch' || !view.fitted) move(((x - to[0]) * view.w) / width, ((y - to[1]) * view.w) / width);
    if (far > STILL) box.setPointerCapture(event.pointerId); // not before: a captured pointer clicks no link
  });
  for (const end of ['pointerup', 'pointercancel']) box.addEventListener(end, (event) => held.delete(event.pointerId));
  box.addEventListener('click', (event) => event.detail && far > STILL && event.preventDefault(), true);
  box.addEventListener('keydown', (event) => {
    const step = view.w / 10;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
    const factor = { '+': 0.8, '=': 0.8, '-': 1.25 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || (!moves && !factor && event.key !== '0')) return;
    if (moves) move(...moves);
    else if (factor) zoom(factor);
    else fit();
    event.preventDefault();
  });
  const sizes = new ResizeObserver(() => {
    if (!view || view.fitted) return fit();
    const [width, height] = pixels();
    view.h = (view.w * height) / width;
    put();
  });
  sizes.observe(box);
  el.querySelector('.graph-frame').frame = {
    again(next, size) {
      const grew = size.w !== all.w || size.h !== all.h;
      all = size;
      like(svg, next);
      if (grew && view.fitted) fit();
      else put();
    },
  };
  return el;
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function nodeOf({ node: { agent }, x, y }) {
  const link = s('a', { href: agentPath(agent.id), class: `node node-${agent.state}`, 'data-key': agent.id });
  const wide = (text) => (/[\u2e80-\uffff]/.test(text) ? 8 : 16); // characters that fit
  const name = s('text', { x: x + 12, y: y + 22, class: 'node-name' });
  name.textContent = short(agent.name, wide(agent.name));
  const state = s('text', { x: x + 12, y: y + 40, class: 'node-state' });
  state.textContent = short(doing(agent), wide(doing(agent)) + 2);
  const title = s('title', {});
  title.textContent = [`${agent.name}: ${doing(agent)}`, agent.description].filter(Boolean).join('\n');
  link.append(title, s('rect', { x, y, width: WIDE, height: HIGH, rx: 12 }), name, state);
  return link;
}
