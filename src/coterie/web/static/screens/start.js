// First run: connect a model in one card, say hello, then create a team.

import { get, post, put, query } from '../api.js';
import { button, fill, h, iconButton } from '../dom.js';
import { lang, t } from '../i18n.js';
import { agentPath, go } from '../router.js';
import { region } from '../shell.js';
import { on, resync, state } from '../state.js';
import { sendText } from '../composer.js';
import { modelField } from './model_field.js';
import { outcomeOf, TEST_MS } from './service_form.js';
import { busy, choice, failed, field, styled } from './parts.js';

await styled('/static/screens/agents.css');

const LATER = 'coterie.startLater';
const originOf = (address) => /^\w+:\/\/[^/?#]+/.exec(address.trim())?.[0] ?? '';
const living = () => [...state.agents.values()].filter((one) => one.kind !== 'person' && one.state !== 'terminated' && !one.retired);
/** True if no agent has a real model. */
const isUnconnected = () => living().length > 0 && living().every((one) => ['tour', 'tour-sees'].includes(one.service) || !one.service);

/** The card above the conversation, until a model is connected or the person puts it off. */
export function start() {
  let card = null;
  const paint = () => {
    const wanted = state.booted && isUnconnected() && !localStorage.getItem(LATER) && !location.hash.startsWith('#/start');
    if (!wanted) card?.remove();
    else if (!card?.isConnected) {
      card = h('section', { class: 'start-card', 'aria-label': t('startConnect'), 'data-testid': 'start-card' },
        h('div', { class: 'start-words' }, h('strong', { text: t('startNoModel') }), h('span', { class: 'meta', text: t('startAbout') })),
        h('a', { class: 'primary start-go', href: '#/start', text: t('startConnect') }),
        iconButton('close', t('startLater'), { onclick: () => {
          localStorage.setItem(LATER, '1');
          paint();
        } }));
      region('away').append(card);
    }
  };
  on(['snapshot', 'agents'], paint);
  document.addEventListener('screen', paint);
  document.addEventListener('languagechange', () => {
    card?.remove();
    paint();
  });
  paint();
}

export function render(root) {
  const body = h('div', { class: 'start' });
  let gone = false;
  fill(root, body);
  const load = async () => {
    try {
      const services = await get('/services?probe=true');
      if (gone) return;
      const mine = services.items.find((one) => !one.tour);
      if (mine) await connected(body, mine);
      else connect(body, services, (one) => !gone && connected(body, one));
    } catch {
      if (!gone) fill(body, failed(t('notLoaded'), load));
    }
  };
  load();
  return () => {
    gone = true;
  };
}

function connect(body, { presets, offers }, done) {
  const found = new Map(offers.map((one) => [one.id, one]));
  // What was found on this machine first: it needs no key to be entered.
  const all = [...offers, ...presets.filter((one) => !found.has(one.id)), { id: 'other', name: t('presetOther'), baseURL: '', apiKey: null, capabilities: null }];
  let chosen = all[0];
  const key = h('input', { type: 'password', autocomplete: 'new-password', spellcheck: 'false', 'data-testid': 'start-key' });
  const base = h('input', { type: 'url', required: true, autocomplete: 'off', spellcheck: 'false', 'data-testid': 'start-url' });
  const outcome = h('p', { class: 'outcome', role: 'status', 'data-testid': 'start-outcome' });
  const keyField = field(t('key'), key, t('keyWriteOnly'));
  const baseField = field(t('baseURL'), base);
  const fields = () => ({
    name: chosen.id === 'other' ? t('startService') : chosen.name, provider: 'openai', baseURL: base.value.trim(), model: model.input.value.trim(),
    ...(key.value ? { key: key.value } : found.has(chosen.id) && chosen.apiKey ? { apiKey: chosen.apiKey } : {}),
    ...(chosen.capabilities && { capabilities: chosen.capabilities }),
  });
  const id = () => (chosen.id === 'other' ? 'main' : chosen.id);
  const needsKey = () => Boolean(chosen.apiKey) && !found.has(chosen.id);
  const model = modelField('', () => (base.value.trim() && (key.value || !needsKey()) ? { id: id(), fields: fields() } : null));
  // A key is sent only to the address that it was typed for.
  let origin = '';
  const forgetKey = (hint) => {
    key.value = '';
    keyField.lastChild.textContent = hint;
  };
  const choose = (name) => {
    chosen = all.find((one) => one.id === name);
    base.value = chosen.baseURL;
    baseField.hidden = Boolean(chosen.apiKey);
    keyField.hidden = found.has(chosen.id) && Boolean(chosen.apiKey);
    forgetKey(t('keyWriteOnly'));
    origin = originOf(base.value);
    key.required = needsKey();
    model.input.value = '';
    fill(outcome);
    model.load();
  };
  key.addEventListener('change', model.load);
  base.addEventListener('change', () => {
    const before = origin;
    origin = originOf(base.value);
    if (before && origin !== before && key.value) forgetKey(t('keyAgain'));
    model.load();
  });

  const path = () => `/services/${encodeURIComponent(id())}`;
  const runTest = async () => {
    const result = await post(`${path()}/test`, fields(), TEST_MS);
    fill(outcome, outcomeOf(result));
    return result.ok;
  };
  const test = button({ class: 'plain-btn', text: t('test'), 'data-testid': 'start-test', onclick: () => form.reportValidity() && busy(test, runTest) });
  const save = h('button', { type: 'submit', class: 'primary', 'data-testid': 'start-save', text: t('startSave') });
  const form = h('form', { class: 'card start-form', 'aria-label': t('startConnect'), onsubmit: (event) => {
    event.preventDefault();
    busy(save, async () => {
      if (!(await runTest())) return;
      const saved = await put(path(), fields());
      await resync();
      await done(saved);
    });
  } },
  h('h2', { text: t('startConnect') }), h('p', { class: 'meta', text: t('startHow') }),
  field(t('preset'), choice(all.map((one) => [one.id, found.has(one.id) ? t('startFound', { name: one.name }) : one.name]), chosen.id, choose)),
  baseField, keyField, model.el, outcome,
  h('div', { class: 'modal-foot' }, h('a', { class: 'text-btn', href: '#/setup', text: t('startMore') }), test, save));
  fill(body, form);
  choose(chosen.id);
  form.querySelector('select').focus();
}

async function connected(body, service) {
  const agent = living().find((one) => !one.parent) ?? living()[0];
  const hello = agent && button({ class: 'primary', text: t('startHello'), 'data-testid': 'start-hello', onclick: () => {
    sendText(agent.id, t('startHelloText'));
    go(agentPath(agent.id));
  } });
  const templates = (await query('/templates', { language: lang() }).catch(() => ({ items: [] }))).items;
  const { templateCards } = await import('./agents.js');
  fill(body,
    h('section', { class: 'card start-form', 'data-testid': 'start-connected' }, h('h2', { text: t('startConnected', { name: service.name }) }), h('p', { class: 'meta', dir: 'auto', text: service.model }),
      h('div', { class: 'modal-foot' }, h('a', { class: 'text-btn', href: '#/setup', text: t('setup') }), hello)),
    h('section', { 'aria-labelledby': 'start-team' }, h('h2', { id: 'start-team', text: t('startTeam') }), h('p', { class: 'meta', text: t('startTeamAbout') }), templateCards(templates)));
  body.querySelector('[data-testid="start-hello"]')?.focus();
}
