// The field of a model's name, with the list that the service itself gives.

import { post } from '../api.js';
import { button, fill, h } from '../dom.js';
import { reasonOf, t } from '../i18n.js';
import { busy, choice, field } from './parts.js';

/**
 * `request()` returns `{id, fields}` of the service as it is entered now, or null if something is missing.
 * Returns `{el, input, load}`; `load` asks the service and fills the list.
 */
export function modelField(value, request) {
  const input = h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', required: true, value: value ?? '', 'data-testid': 'model' });
  const status = h('p', { class: 'meta', role: 'status', 'data-testid': 'models-status' });
  const list = h('div');
  let turn = 0;

  async function load() {
    const wanted = request();
    const mine = (turn += 1);
    status.textContent = wanted ? t('modelsLoading') : '';
    if (!wanted) return void fill(list); // the list of another service
    const found = await post(`/services/${encodeURIComponent(wanted.id)}/models`, wanted.fields).catch((error) => ({ code: 'error', models: [], detail: reasonOf(error) }));
    if (mine !== turn) return;
    const { code, models, detail } = found;
    status.textContent = code === 'ok' ? t('modelsFound', { n: models.length }) : [code === 'error' ? '' : t(`test_${code}`), detail, t('modelsByHand')].filter(Boolean).join(' ');
    if (!models.length) return void fill(list);
    if (!input.value) input.value = models[0];
    const select = choice([...(models.includes(input.value) ? [] : [['', t('modelsChoose')]]), ...models.map((name) => [name, name])], models.includes(input.value) ? input.value : '', (name) => {
      if (name) input.value = name;
      input.dispatchEvent(new Event('input', { bubbles: true }));
    });
    select.dataset.testid = 'models';
    fill(list, field(t('modelsOffered'), select));
  }
  const ask = button({ class: 'text-btn', 'data-testid': 'models-load', text: t('modelsLoad'), onclick: () => busy(ask, load) });
  return { el: h('div', { class: 'model-field' }, field(t('model'), input), list, h('p', { class: 'item-foot' }, status, ask)), input, load };
}
