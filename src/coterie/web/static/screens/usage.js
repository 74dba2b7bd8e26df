// Cost and tokens by day, agent and service: a plot of stacked bars, and the same as tables.

import { query } from '../api.js';
import { empty, fill, h, s } from '../dom.js';
import { count, many, money, roughly, t } from '../i18n.js';
import { who } from '../message.js';
import { on } from '../state.js';
import { costWords } from '../task_line.js';
import { choice, failed, field, newName, section, table } from './parts.js';
import { views } from './tasks.js';

const INKS = ['accent', 'active', 'queued', 'ok', 'danger', 'line-strong'].map((name) => `var(--${name})`);
const [HIGH, TOP, LEFT, FOOT] = [200, 12, 56, 22];

export function render(root, { query: asked }) {
  const wanted = { measure: asked.get('measure') ?? 'tokens', by: asked.get('by') ?? 'agent', days: asked.get('days') ?? '30' };
  const body = h('div');
  let rows = null;
  let turn = 0;

  const pick = (name, options) => choice(options, wanted[name], (value) => {
    wanted[name] = value;
    history.replaceState(null, '', `#/tasks?${new URLSearchParams({ view: 'usage', ...wanted })}`);
    if (name === 'days') load();
    else draw();
  });
  const load = async () => {
    const mine = (turn += 1);
    try {
      const page = await query('/usage', { days: wanted.days });
      if (mine !== turn) return;
      rows = page.items;
      draw();
    } catch {
      if (mine === turn) fill(body, failed(t('notLoaded'), load));
    }
  };
  let width = 0;
  const draw = () => {
    if (!rows) return;
    width = body.clientWidth;
    fill(body, rows.length ? contents(rows, wanted, Math.max(240, width - 26)) : empty(t('usageNone')));
  };

  fill(
    root,
    views('usage'),
    h('div', { class: 'filters' },
      field(t('usageMeasure'), pick('measure', [['tokens', t('usage_tokens')], ['cost', t('usage_cost')]])),
      field(t('usageBy'), pick('by', [['agent', t('timelineAgent')], ['service', t('service')]])),
      field(t('timelineTime'), pick('days', ['7', '30', '90'].map((n) => [n, t('lastDays', { n })])))),
    body,
  );
  load();
  const sizes = new ResizeObserver(() => body.clientWidth !== width && draw());
  sizes.observe(body);
  const stop = on('agents', draw);
  return () => {
    turn += 1;
    sizes.disconnect();
    stop();
  };
}

const tokensOf = (row) => row.inputTokens + row.outputTokens;

function contents(rows, { measure, by, days }, width) {
  const value = measure === 'cost' ? (row) => row.cost ?? 0 : tokensOf;
  const currency = rows.find((row) => row.currency)?.currency;
  const shown = measure === 'cost' ? (n) => money(n, currency) : count;
  const name = by === 'agent' ? who : (id) => id;
  const sums = new Map();
  for (const row of rows) sums.set(row[by], (sums.get(row[by]) ?? 0) + value(row));
  const groups = [...sums].sort((a, b) => b[1] - a[1]).map(([id]) => id);
  const isKnown = measure !== 'cost' || rows.some((row) => row.cost !== null && row.cost !== undefined);
  const unpriced = rows.reduce((sum, row) => sum + (row.unpricedRequests ?? 0), 0);
  return [
    !isKnown && h('p', { class: 'item-text', 'data-testid': 'usage-unknown', text: t('costUnknownWhy') }),
    isKnown && measure === 'cost' && unpriced > 0 && h('p', { class: 'meta', text: t('costPartly', { n: many('requests', unpriced) }) }),
    isKnown && plot(rows, { by, groups, value, shown, name, days: Number(days), width, label: t('usageLabel', { what: t(`usage_${measure}`), n: days }) }),
    section('usage-sums', t('usageSums'), totals(rows, by, groups, name, currency)),
  ];
}

/** The last days, oldest first, as the server names them. */
function daysOf(rows, n) {
  const last = Math.max(Date.parse(rows.reduce((latest, row) => (row.day > latest ? row.day : latest), '')), Date.parse(new Date().toISOString().slice(0, 10)));
  return Array.from({ length: n }, (_, at) => new Date(last - (n - 1 - at) * 86_400_000).toISOString().slice(0, 10));
}

function plot(rows, { by, groups, value, shown, name, days, width, label }) {
  const all = daysOf(rows, days);
  const ink = (id) => INKS[Math.min(groups.indexOf(id), INKS.length - 1)];
  const byDay = new Map(all.map((day) => [day, new Map()]));
  for (const row of rows) {
    const day = byDay.get(row.day);
    if (day) day.set(row[by], (day.get(row[by]) ?? 0) + value(row));
  }
  const sum = (day) => [...day.values()].reduce((total, n) => total + n, 0);
  const most = Math.max(...[...byDay.values()].map(sum)) || 1;
  const step = (width - LEFT) / all.length;
  const y = (n) => TOP + HIGH * (1 - n / most);
  const svg = s('svg', { viewBox: `0 0 ${width} ${TOP + HIGH + FOOT}`, width, height: TOP + HIGH + FOOT, class: 'graph', role: 'img', 'aria-label': label, 'data-testid': 'usage-plot' });
  const text = (words, x, at, anchor) => {
    const el = s('text', { x, y: at, fill: 'var(--ink2)', 'font-size': 12, 'text-anchor': anchor });
    el.textContent = words;
    svg.append(el);
  };
  for (const part of [0, 0.5, 1]) {
    svg.append(s('path', { d: `M${LEFT} ${y(most * part)}H${width}`, stroke: 'var(--line)' }));
    text(shown === count ? roughly(most * part) : shown(most * part), LEFT - 6, y(most * part) + 4, 'end');
  }
  all.forEach((day, at) => {
    let base = 0;
    for (const id of groups) {
      const n = byDay.get(day).get(id) ?? 0;
      if (!n) continue;
      const bar = s('rect', { x: LEFT + at * step + step * 0.1, y: y(base + n), width: step * 0.8, height: Math.max(1, y(base) - y(base + n)), fill: ink(id), stroke: 'var(--surface)', class: 'usage-bar' });
      const title = s('title', {});
      title.textContent = `${day} · ${name(id)} · ${shown(n)}`;
      bar.append(title);
      svg.append(bar);
      base += n;
    }
  });
  const every = Math.ceil(80 / step);
  all.forEach((day, at) => (all.length - 1 - at) % every === 0 && text(day.slice(5), LEFT + (at + 0.5) * step, TOP + HIGH + 16, at === all.length - 1 && step < 40 ? 'end' : 'middle'));
  const id = newName('usage');
  const used = all.filter((day) => byDay.get(day).size);
  const legend = h('p', { class: 'item-foot meta' }, groups.slice(0, INKS.length).map((group, at) => h('span', { class: 'cap' }, s('svg', { width: 12, height: 12, 'aria-hidden': 'true' }, s('rect', { width: 12, height: 12, fill: ink(group) })), at === INKS.length - 1 && groups.length > INKS.length ? t('usageOthers') : name(group))));
  return h('section', {}, h('div', { class: 'card' }, svg), legend, h('details', { class: 'runs' }, h('summary', { id, text: t('asTable') }),
    table(id, [t('usageDay'), ...groups.map(name), t('usageSum')], used.map((day) => [day, ...groups.map((group) => shown(byDay.get(day).get(group) ?? 0)), shown(sum(byDay.get(day)))]))));
}

function totals(rows, by, groups, name, currency) {
  const columns = [['figureRequests', 'requests'], ['tokensIn', 'inputTokens'], ['tokensCached', 'cachedTokens'], ['tokensOut', 'outputTokens']];
  const cells = (mine) => {
    const sum = (key) => mine.reduce((total, row) => total + (row[key] ?? 0), 0);
    const isKnown = mine.some((row) => row.cost !== null && row.cost !== undefined);
    return [...columns.map(([, key]) => count(sum(key))), costWords({ cost: isKnown ? sum('cost') : null, currency, unpricedRequests: sum('unpricedRequests') }) ?? t('unknown')];
  };
  return table('usage-sums', [t(by === 'agent' ? 'timelineAgent' : 'service'), ...columns.map(([key]) => t(key)), t('figureCost')],
    [...groups.map((id) => [name(id), ...cells(rows.filter((row) => row[by] === id))]), [t('usageSum'), ...cells(rows)]]);
}
