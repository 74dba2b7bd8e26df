// The card in a thread whose agent does not go on.

import { button, h, setText } from './dom.js';
import { post } from './api.js';
import { elapsed, t } from './i18n.js';
import { everySecond, now, state } from './state.js';

/** Why an agent does not go on, in plain words, with the way out. */
export function problemView(id) {
  const words = h('p', { class: 'problem-what' });
  const detail = h('p', { class: 'problem-why', dir: 'auto' });
  const when = h('p', { class: 'meta num' });
  const again = button({ class: 'plain-btn', 'data-testid': 'problem-retry', onclick: () => post(`/agents/${encodeURIComponent(id)}/resume`).catch(async (error) => {
    const { toast } = await import('./toasts.js');
    toast({ kind: 'error', text: t('actionFailed', { detail: error.detail }) });
  }) }, t('retry'));
  const setup = h('a', { class: 'text-btn', href: '#/setup' }, t('setup'));
  const copying = button({ class: 'text-btn', onclick: () => import('./toasts.js').then((toasts) => toasts.copy(detail.textContent)) }, t('copy'));
  const el = h('article', { class: 'msg msg-problem', tabindex: '-1', 'data-testid': 'problem', data: { key: 'problem' } },
    h('div', { class: 'problem' }, words, h('details', {}, h('summary', {}, t('details')), detail, copying), when, h('div', { class: 'problem-acts' }, again, setup)));

  function update() {
    const told = state.problems.get(id);
    const one = state.agents.get(id);
    const key = `problem_${told?.category}`;
    setText(words, t(key) === key ? t('problem_other') : t(key));
    setText(detail, told?.message ?? one?.why ?? '');
    setup.hidden = told && told.category !== 'auth';
    tick();
  }
  function tick() {
    const at = state.problems.get(id)?.retryAt;
    setText(when, at ? t('problemRetryIn', { time: elapsed(Date.parse(at) - now()) }) : t('problemHow'));
  }
  update();
  return { el, update, leave: everySecond(tick) };
}
