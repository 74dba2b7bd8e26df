// Tool runs in the thread, and plans that an interjection withdrew.

import { button, fileIcon, h, icon, setAttr, setText, sync, toComposer } from './dom.js';
import { dayName, elapsed, seconds, t } from './i18n.js';
import { oops } from './notices.js';
import { everySecond, loadOlderPlans, nameOf, now, on, PERSON, progressOf, state, thread } from './state.js';

const SIGNS = { done: '✓', failed: '✗', started: '…', planned: '·', gated: '?', cancelled: '–', unknown: '?' };

/** The calls of plans. Without `all`, omits messages to the person, which are in the thread already. */
export function callsOf(plans, all = false) {
  return plans.flatMap((plan) => plan.calls.map((call) => ({ ...call, id: `${plan.at} ${call.callId}`, withdrawn: plan.outcome === 'withdrawn' || isCut(call) })))
    .filter((call) => all || call.withdrawn || !(call.name === 'send_message' && call.state === 'done' && target(call) === PERSON));
}

const isCut = (call) => call.state === 'cancelled' && /interrupted_by_new_message/.test(call.result);

function target(call) {
  try {
    return JSON.parse(call.arguments).to;
  } catch {
    return undefined;
  }
}

/** Files that calls have made, as their results name them. */
function filesOf(calls) {
  const found = calls.filter((call) => call.state === 'done' && call.result.startsWith('{')).map((call) => {
    try {
      return JSON.parse(call.result);
    } catch {
      return {};
    }
  });
  return found.filter(({ artifactRef, filename }) => typeof artifactRef === 'string' && typeof filename === 'string');
}

const isDenied = (call) => call.state === 'cancelled' && /^\{"status":\s*"denied"/.test(call.result);

const stateWord = (call) => t(`run_${call.withdrawn ? 'withdrawn' : isDenied(call) ? 'denied' : SIGNS[call.state] ? call.state : 'unknown'}`);
const took = (call) => (call.startedAt && call.endedAt ? Date.parse(call.endedAt) - Date.parse(call.startedAt) : null);

/** The button that loads earlier steps of an agent. */
export function earlierView(agent) {
  const load = button({ class: 'plain-btn', text: t('earlierSteps'), onclick: async () => {
    if (load.ariaDisabled) return;
    setAttr(load, 'aria-disabled', 'true');
    await loadOlderPlans(agent).catch(oops);
    setAttr(load, 'aria-disabled', null);
    if (!thread(agent).morePlans && [load, document.body].includes(document.activeElement)) toComposer();
  } });
  return { el: h('article', { class: 'msg msg-earlier', tabindex: '-1', 'data-testid': 'earlier', 'aria-label': t('earlierSteps') }, load), update() {}, leave() {} };
}

export function runsView(item) {
  const day = h('div', { class: 'day', hidden: true });
  const title = h('span', { class: 'runs-title' });
  const signs = h('span', { class: 'runs-signs', 'aria-hidden': 'true' });
  const time = h('span', { class: 'meta num' });
  const progress = h('span', { class: 'meta runs-progress', dir: 'auto', 'data-testid': 'progress' });
  const list = h('ol', { class: 'runs-list' });
  const box = h('details', { class: 'runs' }, h('summary', {}, icon('tool'), title, progress, time, signs), list);
  const made = h('ul', { class: 'files runs-files', 'aria-label': t('artifacts'), hidden: true });
  const el = h('article', { class: 'msg msg-runs', tabindex: '-1', 'data-testid': 'runs' }, day, box, made);
  let last = item;
  let shown = '';

  function update(next) {
    last = next;
    day.hidden = !next.day;
    if (next.day) setText(day, dayName(next.day));
    const calls = next.calls;
    const key = JSON.stringify(calls);
    if (key === shown) return;
    shown = key;
    const running = calls.find((call) => call.state === 'started' && !call.withdrawn);
    setText(title, titleOf(calls, running));
    signs.replaceChildren(...calls.map((call) => h('span', { class: `sign sign-${call.withdrawn ? 'withdrawn' : call.state}` }, call.withdrawn ? '⊘' : SIGNS[call.state] ?? '?')));
    box.classList.toggle('has-withdrawn', calls.some((call) => call.withdrawn));
    el.setAttribute('aria-label', [title.textContent, ...calls.map((call) => `${call.name} ${stateWord(call)}`)].join(', '));
    sync(list, calls.map(callRow));
    const files = filesOf(calls);
    made.hidden = !files.length;
    made.replaceChildren(...files.map(({ artifactRef, filename, type }) => h('li', { class: 'file' }, fileIcon(type), h('a', { class: 'file-name', href: `#/artifacts/${encodeURIComponent(artifactRef)}` }, filename))));
    tick();
  }

  function tick() {
    const running = last.calls.find((call) => call.state === 'started' && !call.withdrawn);
    setText(progress, running && state.progress.get(last.agent)?.callId === running.callId ? progressOf(last.agent) : '');
    const sum = last.calls.reduce((all, call) => all + (took(call) ?? 0), 0);
    setText(time, running?.startedAt ? elapsed(now() - Date.parse(running.startedAt)) : sum ? seconds(sum) : '');
  }

  update(item);
  const ends = [everySecond(tick), on(`progress:${item.agent}`, tick)];
  return { el, update, leave: () => ends.forEach((end) => end()) };
}

const RAN = new Set(['done', 'failed', 'unknown']);

/** What the calls of one line did. A call that has not run is never said to have run. */
function titleOf(calls, running) {
  if (running) return t('runningTool', { name: running.name });
  const gated = calls.find((call) => call.state === 'gated' && !call.withdrawn);
  if (gated) return t('awaitsApproval', { name: gated.name });
  const ran = calls.filter((call) => RAN.has(call.state) && !call.withdrawn).length;
  if (calls.length > 1 && ran) return ran === calls.length ? t('ranTools', { n: ran }) : t('ranSome', { n: ran, m: calls.length });
  const [call] = calls;
  const all = (read) => [...new Set(calls.map(read))].join(t('comma'));
  if (!ran) return `${all(({ name }) => name)} · ${all(stateWord)}`;
  return call.name === 'send_message' && target(call) ? t('sentTo', { name: nameOf(target(call)) }) : t('ranTool', { name: call.name });
}

/** One call: name, state, arguments and result. */
export function callRow(call) {
  const ms = took(call);
  return h('li', { class: `run run-${call.withdrawn ? 'withdrawn' : call.state}`, 'data-testid': 'run', data: { state: call.withdrawn ? 'withdrawn' : call.state, key: call.id } },
    h('div', { class: 'run-head' }, h('code', {}, call.name), h('span', { class: 'run-state' }, stateWord(call)), ms === null ? null : h('span', { class: 'meta num' }, seconds(ms))),
    block('arguments', call.arguments), call.result && !call.withdrawn && block('result', call.result));
}

function block(key, text) {
  return h('details', { class: 'run-more' }, h('summary', {}, t(key), h('span', { class: 'run-peek' }, text.slice(0, 100))), h('pre', { tabindex: '0', dir: 'auto' }, pretty(text)));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
