// The form of one model service: address, model, capabilities and key. A key is never shown again.

import { post, put } from '../api.js';
import { button, fill, h } from '../dom.js';
import { dayAndTime, many, t } from '../i18n.js';
import { modelField } from './model_field.js';
import { busy, choice, field, toggle } from './parts.js';

const OUTPUT = ['text', 'tool_calling', 'structured_output'];
const INPUT = ['text', 'vision', 'audio', 'file'];
const UNKNOWN = { input: ['text'], output: ['text'] };
export const TEST_MS = 150_000; // three requests
export const CAPABILITIES = [...INPUT, ...OUTPUT.slice(1)];

/** `from`: a service or a preset; `known`: the service exists, and empty fields stay unchanged. */
export function serviceForm(from, { known, items, offers, presets, saved, closed }) {
  const taken = new Set(known ? [] : items.map((one) => one.id));
  const text = (value, props = {}) => h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', value: value ?? '', ...props });
  const free = (wanted) => {
    for (let n = 1; ; n += 1) {
      const tried = n > 1 ? `${wanted}-${n}` : wanted;
      if (!taken.has(tried)) return tried;
    }
  };
  const id = text(from.id && free(from.id), { required: true, readonly: known });
  const name = text(from.name);
  const base = text(from.baseURL, { type: 'url', required: true });
  const picker = modelField(from.model ?? from.models?.[0], () => (!isTaken() && id.value.trim() && base.value.trim() ? { id: id.value.trim(), fields: fields() } : null));
  const model = picker.input;
  const key = h('input', { type: 'password', autocomplete: 'new-password', spellcheck: 'false', 'data-testid': 'service-key' });
  const abilities = h('fieldset', { class: 'abilities' });
  const outcome = h('p', { class: 'outcome', role: 'status' });
  // Saving under the id of another service would replace that service and its key.
  const idProblem = h('p', { class: 'inline-error', role: 'alert', hidden: true });
  const isTaken = () => {
    const found = taken.has(id.value.trim());
    idProblem.hidden = !found;
    idProblem.textContent = found ? t('serviceIdTaken', { id: id.value.trim() }) : '';
    return found;
  };
  const mayBeSent = () => {
    if (isTaken()) id.focus();
    return idProblem.hidden;
  };
  id.addEventListener('input', isTaken);
  const moved = () => known && from.apiKey && base.value.trim() !== from.baseURL;
  let apiKey = known ? undefined : from.apiKey;
  const can = { input: new Set(), output: new Set() };
  // Only capabilities that the person declared are sent. The server writes those that the test finds.
  let declared = known ? from.capabilities?.source === 'declared' : Boolean(from.capabilities);

  const tick = (capabilities) => {
    for (const way of ['input', 'output']) can[way] = new Set(capabilities[way]);
    fill(
      abilities,
      h('legend', { text: t('setupCapabilities') }),
      [['input', INPUT], ['output', OUTPUT]].map((/** @type {any[]} */ [way, all]) =>
        h('div', { class: 'checks', role: 'group', 'aria-label': t(`way_${way}`) }, h('span', { class: 'meta', text: t(`way_${way}`) }), all.map((one) => toggle(t(`can_${one}`), can[way].has(one), (on) => {
          declared = true;
          can[way][on ? 'add' : 'delete'](one);
        }))),
      ),
    );
  };
  const preset = (chosen) => {
    const one = presets.find((each) => each.id === chosen);
    if (!one) return;
    if (!known) id.value = free(one.id);
    isTaken();
    [name.value, base.value, key.value] = [one.name, one.baseURL, '']; // a typed key belongs to one provider
    declared = Boolean(one.capabilities);
    tick(one.capabilities ?? UNKNOWN);
    const offer = offers.find((each) => each.id === chosen);
    apiKey = offer?.apiKey;
    keyField.lastChild.textContent = hint();
    if (offer?.models?.length && !model.value) model.value = offer.models[0];
  };
  const fields = () => {
    const entered = { name: name.value || id.value, provider: from.provider ?? 'openai', baseURL: base.value.trim(), model: model.value.trim() };
    if (declared) entered.capabilities = { input: [...can.input], output: [...can.output] };
    if (key.value || moved()) entered.key = key.value;
    else if (apiKey) entered.apiKey = apiKey;
    return entered;
  };
  const hint = () => moved() ? t('keyAgain') : known && from.apiKey ? t('keyKept', { key: from.apiKey }) : apiKey ? t('keyFromEnvironment', { name: apiKey.slice(2, -1) }) : t('keyWriteOnly');
  const keyField = field(t('key'), key, hint());
  base.oninput = () => (keyField.lastChild.textContent = hint());
  const path = () => `/services/${encodeURIComponent(id.value.trim())}`;
  const runTest = async () => {
    const result = await post(`${path()}/test`, fields(), TEST_MS);
    fill(outcome, outcomeOf(result));
    const { tool_calling: tools, vision } = result.capabilities;
    if (!declared && (tools ?? vision) !== undefined) tick({ input: vision ? ['text', 'vision'] : ['text'], output: tools ?? true ? ['text', 'tool_calling'] : ['text'] });
  };
  const test = button({ class: 'plain-btn', text: t('test'), onclick: () => mayBeSent() && form.reportValidity() && busy(test, runTest) });
  const save = h('button', { type: 'submit', class: 'primary', text: t('save') });
  const form = h(
    'form',
    { class: 'card service-form', 'aria-label': t(known ? 'setupEdit' : 'setupAdd'), onsubmit: (event) => {
      event.preventDefault();
      if (mayBeSent()) busy(save, () => put(path(), fields()).then(saved));
    } },
    h('h2', { text: t(known ? 'setupEdit' : 'setupAdd') }),
    !known && field(t('preset'), choice([['', t('presetOther')], ...presets.map((one) => [one.id, one.name])], presets.some((one) => one.id === from.id) ? from.id : '', preset)),
    field(t('serviceId'), id),
    idProblem,
    field(t('serviceName'), name),
    field(t('baseURL'), base),
    picker.el,
    keyField,
    abilities,
    outcome,
    h('div', { class: 'modal-foot' }, button({ class: 'plain-btn', text: t('cancel'), onclick: closed }), test, save),
  );
  tick(from.capabilities ?? UNKNOWN);
  return form;
}

const foundOf = ({ capabilities = {} }) => Object.entries(capabilities).map(([name, works]) => t(`found_${name}_${works}`));

/** The result of a service test in the page's language: the server sends a code and English text. `answered`: real requests. */
export function outcomeOf(result, answered = 0) {
  if (!result && answered) return [h('span', { class: 'tag ok', text: t('testOk') }), ' ', h('span', { text: t('serviceAnswers', { n: many('requests', answered) }) })];
  if (!result) return [h('span', { class: 'tag', text: t('untested') })];
  const text = result.ok ? t('test_ok', { s: (result.ms / 1000).toFixed(1) }) : t(`test_${result.code}`);
  return [
    h('span', { class: result.ok ? 'tag ok' : 'tag bad', text: t(result.ok ? 'testOk' : 'testBad') }),
    ' ',
    h('span', { text: [text, ...foundOf(result)].join(' '), title: dayAndTime(result.at) }),
    result.detail && h('span', { class: 'meta block', dir: 'auto', text: result.detail }),
  ].filter(Boolean);
}
