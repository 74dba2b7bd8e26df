// The banner: whose conversation this is, what they are doing, how the line to the server is.

import { button, fill, h, icon, iconButton, setText } from './dom.js';
import { post } from './api.js';
import { elapsed, t } from './i18n.js';
import { oops } from './notices.js';
import { everySecond, now, on, state } from './state.js';
import { screenTitle, setHeading, shownAt, toggleSlide } from './shell.js';

export const stopping = new Set();

/** What an agent is doing, in a few words. */
export function doing(agent) {
  if (agent.state !== 'active') return t(agent.state);
  if (stopping.has(agent.id)) return t('stopping');
  if (agent.phase === 'tool' && agent.tool) return agent.tool;
  const says = agent.phase === 'thinking' && [...state.drafts.values()].some((one) => one.agent === agent.id && !one.stopped && !one.ended);
  return t(says ? 'phase_replying' : `phase_${agent.phase ?? 'thinking'}`);
}

export async function stop(id) {
  if (state.agents.get(id)?.state !== 'active' || stopping.has(id)) return;
  stopping.add(id);
  paintAll(id);
  try {
    await post(`/agents/${encodeURIComponent(id)}/stop`);
  } catch (error) {
    stopping.delete(id);
    paintAll(id);
    oops(error, () => stop(id));
  }
}

const paintAll = (id) => document.dispatchEvent(new CustomEvent('agent-painted', { detail: id }));

export const dot = (agent) => h('span', { class: `dot dot-${agent.state}`, 'aria-hidden': 'true' });

export function mountHeader(root) {
  const title = h('h1', { class: 'top-title', 'data-testid': 'title' });
  const status = h('span', { class: 'top-state', 'data-testid': 'agent-state' });
  const clock = h('span', { class: 'meta num', 'data-testid': 'elapsed' });
  const stopper = button({ class: 'stop-btn', 'data-testid': 'stop', onclick: () => stop(agent()?.id) }, icon('stop'), h('span', {}, t('stop')));
  const chip = h('span', { class: 'chip', role: 'status', 'data-testid': 'connection' });
  fill(root,
    iconButton('menu', t('menu'), { class: 'only-small', 'aria-controls': 'side', 'aria-expanded': 'false', onclick: () => toggleSlide('side'), 'data-testid': 'menu' }),
    h('div', { class: 'top-who' }, title, status, clock, stopper),
    chip,
    button({ class: 'search-btn', 'aria-label': t('search'), 'data-testid': 'search', onclick: () => import('./keyboard.js').then((keys) => keys.openPalette()) },
      icon('search'), h('span', { class: 'wide-only' }, t('search')), h('kbd', { class: 'wide-only' }, 'Ctrl K')),
    iconButton('side', t('details'), { class: 'only-medium', 'aria-controls': 'inspector', 'aria-expanded': 'false', onclick: () => toggleSlide('inspector'), 'data-testid': 'details' }));

  const agent = () => {
    const at = shownAt();
    return at.name === 'a' || at.name === '' ? state.agents.get(at.args[0] ?? state.home) : undefined;
  };

  function paint() {
    const one = agent();
    const name = one ? one.name || one.id : shownAt().name === 'a' ? shownAt().args[0] : screenTitle();
    setText(title, name || 'Coterie');
    setHeading(name);
    if (one?.state !== 'active') stopping.delete(one?.id);
    fill(status, one ? [dot(one), h('span', {}, one.state === 'active' ? `${t('active')} · ${doing(one)}${steps(one)}` : t(one.state))] : []);
    if (one?.service === 'tour') status.append(h('span', { class: 'tag' }, t('tour')));
    status.className = `top-state is-${one?.state ?? 'none'}`;
    stopper.hidden = one?.state !== 'active';
    stopper.setAttribute('aria-label', one ? t('stopAgent', { name: one.name }) : t('stop'));
    stopper.setAttribute('aria-disabled', String(stopping.has(one?.id)));
    tick();
  }

  function tick() {
    const one = agent();
    setText(clock, one?.state === 'active' && one.since ? elapsed(now() - Date.parse(one.since)) : '');
  }

  function line() {
    const what = state.connection;
    chip.className = `chip chip-${what}`;
    setText(chip, what === 'ok' ? '' : t(what));
  }

  let watched = () => {};
  const follow = () => {
    watched();
    const id = agent()?.id;
    watched = id ? on([`agent:${id}`, `drafts:${id}`], paint) : () => {};
    paint();
  };
  document.addEventListener('screen', follow);
  document.addEventListener('agent-painted', paint);
  const ends = [on(['agents', 'snapshot'], follow), on('connection', line), everySecond(tick)];
  follow();
  line();
  return () => {
    document.removeEventListener('screen', follow);
    document.removeEventListener('agent-painted', paint);
    watched();
    ends.forEach((end) => end());
  };
}

const steps = (one) => (one.phase === 'tool' && one.step ? ` ${t('stepOf', { n: one.step[0], m: one.step[1] })}` : '');
