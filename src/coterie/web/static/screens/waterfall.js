// A task over time: one lane per agent, with bars for its model requests, its tool calls and its waiting.

import { fill, h, s } from '../dom.js';
import { clockTime, duration, many, t } from '../i18n.js';
import { who } from '../message.js';
import { now, PERSON, state } from '../state.js';
import { newName, table } from './parts.js';

const [LANE, BAR, TOP, SIDE, CUT] = [46, 16, 26, 10, 72]; // pixels: lane, bar, axis, margin, a gap that was cut out
const LEAST = 3; // width of the shortest bar
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400].map((one) => one * 1000);
const KINDS = ['wait', 'model', 'tool'];
const INKS = { wait: 'var(--line-strong)', model: 'var(--accent)', tool: 'var(--active)' };

/** Returns `{el, draw, leave}`. `draw(task, used)` shows a task, `draw()` extends the bars of what still runs. `used`: agent -> words. */
export function waterfall() {
  let shown = null;
  const frame = h('div', { class: 'card', 'data-testid': 'waterfall' });
  const name = newName('waterfall');
  const more = h('details', { class: 'runs', ontoggle: () => draw() }, h('summary', { id: name, text: t('asTable') }), h('div'));
  const legend = h('p', { class: 'item-foot meta' }, KINDS.map((kind) => h('span', { class: 'cap' }, s('svg', { width: 12, height: 12, 'aria-hidden': 'true' }, mark(kind, 0, 0, 12, 12)), t(`bar_${kind}`))));
  const draw = (...next) => {
    if (next.length) shown = next;
    if (!shown) return;
    const [task, used] = shown;
    const bars = barsOf(task);
    width = frame.clientWidth;
    fill(frame, picture(bars, used, Math.max(200, width - 26)));
    if (more.open) fill(more.lastChild, asTable(name, bars));
  };
  let width = 0;
  const sizes = new ResizeObserver(() => frame.clientWidth !== width && draw());
  sizes.observe(frame);
  return { el: h('section', { 'aria-label': t('taskView_time') }, legend, frame, more), draw, leave: () => sizes.disconnect() };
}

/** The bars of a task, `{agent, kind, from, to, text}`, in ms. */
function barsOf({ nodes, state: taskState }) {
  const end = now();
  const at = (time, or = end) => (time ? Date.parse(time) : or);
  const bars = [];
  const put = (agent, kind, from, to, text) => bars.push({ agent, kind, from, to: Math.max(from, to), text });
  for (const node of nodes) {
    if (node.kind === 'message') {
      const open = node.state === 'pending' && (taskState === 'working' || taskState === 'waiting');
      if (node.to !== PERSON && node.deliveredAt && (node.takenAt || open)) put(node.to, 'wait', at(node.deliveredAt), at(node.takenAt), t('barQueued', { name: who(node.from) }));
      continue;
    }
    const [from, to] = [at(node.startedAt), at(node.endedAt)];
    put(node.agent, 'wait', from, to, t(`turn_${node.state}`, { time: duration(to - from) }));
    for (const one of node.requests) put(node.agent, 'model', Math.max(from, at(one.at) - one.ms), at(one.at), [one.service, many('tokens', one.inputTokens + one.outputTokens), one.outcome === 'withdrawn' && t('answerWithdrawn')].filter(Boolean).join(' · '));
    for (const call of node.calls) if (call.startedAt) put(node.agent, 'tool', at(call.startedAt), at(call.endedAt, to), [call.name, t(`run_${call.state}`)].join(' · '));
    // A request is stored when it ends: until then only the agent's state shows that one runs.
    const agent = state.agents.get(node.agent);
    if (!node.endedAt && agent?.state === 'active' && agent.phase === 'thinking') {
      const known = [...node.requests.map((one) => at(one.at)), ...node.calls.map((one) => at(one.endedAt, from))];
      put(node.agent, 'model', Math.max(from, ...known), end, t('phase_thinking'));
    }
  }
  return bars;
}

/** Maps times to positions. Long times in which nothing happened are cut to a fixed width. */
function scaleOf(bars, width) {
  const spans = [];
  for (const { from, to } of [...bars].sort((a, b) => a.from - b.from)) {
    if (spans.length && from <= spans.at(-1).to) spans.at(-1).to = Math.max(spans.at(-1).to, to);
    else spans.push({ from, to });
  }
  const busy = spans.reduce((sum, one) => sum + one.to - one.from, 0);
  const longest = Math.max(10_000, busy / 5);
  const parts = [];
  for (const span of spans) {
    if (parts.length && span.from - parts.at(-1).to <= longest) parts.at(-1).to = span.to;
    else parts.push({ ...span });
  }
  const plotWidth = width - 2 * SIDE - CUT * (parts.length - 1);
  const total = Math.max(1, parts.reduce((sum, one) => sum + one.to - one.from, 0));
  let x = SIDE;
  for (const part of /** @type {any[]} */ (parts)) {
    part.x = x;
    part.width = Math.max(LEAST, ((part.to - part.from) / total) * plotWidth);
    x += part.width + CUT;
  }
  const xOf = (time) => {
    const part = parts.findLast((one) => one.from <= time) ?? parts[0];
    return part.x + Math.min(1, (time - part.from) / Math.max(1, part.to - part.from)) * part.width;
  };
  return { parts, xOf, perMs: plotWidth / total };
}

function picture(bars, used, width) {
  const lanes = [...new Set([...bars].sort((a, b) => a.from - b.from).map((one) => one.agent))];
  const height = TOP + lanes.length * LANE;
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, width, height, class: 'graph', role: 'img', 'aria-label': t('waterfallLabel', { n: lanes.length, time: duration(spanOf(bars)) }) });
  if (!bars.length) return svg;
  const scale = scaleOf(bars, width);
  svg.append(...axis(scale, height));
  lanes.forEach((agent, at) => {
    const y = TOP + at * LANE;
    const mine = bars.filter((one) => one.agent === agent).sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
    const name = words(who(agent), SIDE, y + 14, 'start', 'var(--ink)');
    name.append(s('tspan', { fill: 'var(--ink2)', dx: 8 }, used.get(agent) ?? ''));
    svg.append(name);
    for (const bar of mine) {
      const x = scale.xOf(bar.from);
      const el = mark(bar.kind, x, y + 20, Math.max(LEAST, scale.xOf(bar.to) - x), BAR);
      const title = s('title', {});
      title.textContent = [who(agent), t(`bar_${bar.kind}`), duration(bar.to - bar.from), bar.text].join(' · ');
      el.append(title);
      svg.append(el);
    }
  });
  return svg;
}

/** A bar. Waiting is an outline, so that the kinds differ without colours; tools are lower than requests. */
function mark(kind, x, y, width, height) {
  if (kind === 'wait') return s('rect', { x: x + 0.5, y: y + 0.5, width: Math.max(1, width - 1), height: height - 1, rx: 3, fill: 'var(--sunken)', stroke: INKS.wait, class: 'bar-wait' });
  const inset = kind === 'tool' ? height / 4 : 0;
  return s('rect', { x, y: y + inset, width, height: height - 2 * inset, rx: 2, fill: INKS[kind], class: `bar-${kind}` });
}

function words(text, x, y, anchor = 'start', ink = 'var(--ink2)') {
  // The outline keeps lines of the axis off the letters.
  const el = s('text', { x, y, fill: ink, 'font-size': 12, 'text-anchor': anchor, stroke: 'var(--surface)', 'stroke-width': 4, 'paint-order': 'stroke' });
  el.textContent = text;
  return el;
}

function axis({ parts, xOf, perMs }, height) {
  const step = STEPS.find((one) => one * perMs >= 72) ?? STEPS.at(-1);
  const all = [words(clockTime(parts[0].from), SIDE, 12)];
  parts.forEach((part, index) => {
    if (index) all.push(words(`⋯ ${duration(part.from - parts[index - 1].to)}`, part.x - CUT / 2, 12, 'middle'));
    for (let time = part.from; time <= part.to; time += step) {
      const x = xOf(time);
      all.push(s('path', { d: `M${x} ${TOP - 6}V${height}`, stroke: 'var(--line)' }));
      const near = x > part.x + part.width - 30; // of the label of a cut, or of the margin
      if (time > part.from && !(near && index < parts.length - 1)) all.push(words(`+${duration(time - parts[0].from)}`, x, 12, near ? 'end' : 'middle'));
    }
  });
  return all;
}

const spanOf = (bars) => (bars.length ? Math.max(...bars.map((one) => one.to)) - Math.min(...bars.map((one) => one.from)) : 0);

function asTable(name, bars) {
  const first = Math.min(...bars.map((one) => one.from));
  const rows = [...bars].sort((a, b) => a.from - b.from).map((one) => [who(one.agent), t(`bar_${one.kind}`), `+${duration(one.from - first)}`, duration(one.to - one.from), one.text]);
  return table(name, [t('timelineAgent'), t('timelineKind'), t('barStart'), t('barLasted'), t('details')], rows);
}
