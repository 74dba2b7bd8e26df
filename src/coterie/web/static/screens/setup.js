// Model services: the configured ones with capabilities and test results, and those that could be set up. What is stored.

import { del, get, post, put } from '../api.js';
import { button, fill, h } from '../dom.js';
import { bytes, count, many, settingProblem, t } from '../i18n.js';
import { oops, toast } from '../notices.js';
import { on, resync, state } from '../state.js';
import { settings } from './settings.js';
import { showPrograms } from './programs.js';
import { CAPABILITIES, outcomeOf, serviceForm, TEST_MS } from './service_form.js';
import { busy, confirm, failed, section, toggle, when } from './parts.js';

const GUIDE = 'guide';

export function render(root) {
  const body = h('div', { class: 'setup' });
  const form = h('div');
  const stored = h('div');
  const programs = h('div');
  let seen = null;
  let gone = false;

  const load = async (probe = false) => {
    try {
      const [found, usage] = await Promise.all([get(`/services${probe ? '?probe=true' : ''}`), get('/usage?days=30').catch(() => ({ items: [] }))]);
      seen = found;
      for (const one of seen.items) one.answered = usage.items.filter((row) => row.service === one.id).reduce((sum, row) => sum + row.requests, 0);
      if (!gone) draw();
    } catch {
      if (!gone) fill(body, failed(t('notLoaded'), () => load(probe)));
    }
  };
  const changed = async () => {
    fill(form);
    await Promise.all([load(), resync().catch(() => {})]);
  };
  const edit = (from, known) => {
    fill(form, serviceForm(from, { ...seen, known, saved: changed, closed: () => fill(form) }));
    form.querySelector('input, select')?.focus();
  };
  const draw = () =>
    fill(
      body,
      wrongSettings(),
      services(seen, { edit: (one) => edit(one, true), changed }),
      table(seen.items),
      offers(seen.offers, { use: (one) => edit(one, false), probe: () => load(true) }),
      h('section', { class: 'item-foot' }, button({ class: 'primary', text: t('setupAdd'), onclick: () => edit({}, false) }), button({ class: 'plain-btn', text: t('setupReload'), onclick: () => reload(load) }), h('a', { class: 'text-btn', href: '#/dead', text: t('dead') })),
      form,
      tour(seen.items, changed),
      programs,
      stored,
      settings(),
    );
  fill(root, body);
  load();
  showStorage(stored);
  showPrograms(programs);
  // The snapshot brings agents' names; do not redraw a form in use.
  const stop = on(['snapshot', 'society'], () => seen && !form.firstChild && draw());
  return () => {
    gone = true;
    stop();
  };
}

async function reload(load) {
  try {
    const { problems } = await post('/reload');
    toast({ text: problems.length ? t('setupReloadedProblems', { n: many('problems', problems.length) }) : t('setupReloaded') });
    await Promise.all([load(), resync()]);
  } catch (error) {
    if (error.code === 'config_invalid') toast({ kind: 'error', text: t('configRefused') }); // the reasons are shown above
    else oops(error);
  }
}

/** True for a problem that is among those of the configuration. */
const isListed = ({ place, code }) => state.configuration.problems.some((one) => one.place === place && one.code === code);

/** What is wrong with coterie.toml, llmservices.json, keys and tools, until it is mended. */
function wrongSettings() {
  const { applied, problems } = state.configuration;
  if (!problems.length) return null;
  return section('setup-wrong', t('setupConfiguration'), !applied && h('p', { text: t('configRefused') }),
    h('ul', { class: 'items wrong-settings', 'data-testid': 'wrong-settings' }, problems.map((one) => h('li', { class: 'item inline-error', dir: 'auto' }, h('bdi', { class: 'item-head', text: one.place }), h('span', { text: settingProblem(one) })))));
}

// Configured services

function services({ items }, doing) {
  return section(
    'setup-services',
    t('setupServices'),
    items.map((one) => card(one, doing)),
  );
}

function card(one, { edit, changed }) {
  const outcome = h('p', { class: 'outcome', role: 'status' });
  const showResult = (result) => fill(outcome, outcomeOf(result, one.answered));
  showResult(one.trial);
  const path = `/services/${encodeURIComponent(one.id)}`;
  const runTest = async () => showResult((one.trial = await post(`${path}/test`, undefined, TEST_MS)));
  const test = button({ class: 'plain-btn', text: t('test'), 'aria-label': t('testThis', { name: one.name }), onclick: () => busy(test, runTest) });
  const remove = button({ class: 'text-btn danger', text: t('remove'), 'aria-label': t('removeThis', { name: one.name }), onclick: async () => {
    if (await confirm(t('setupRemoveSure', { name: one.name }), t('remove'))) await busy(remove, () => del(path).then(changed));
  } });
  return h(
    'article',
    { class: 'card service', data: { service: one.id } },
    h('h3', {}, h('span', { dir: 'auto', text: one.name }), one.tour && h('span', { class: 'tag', text: t('tour') })),
    !one.tour && h('p', { class: 'meta', dir: 'auto', text: `${one.model} · ${one.baseURL}` }),
    !one.tour && h('p', { class: 'meta', text: one.apiKey ? t('keyIs', { key: one.apiKey }) : t('keyNone') }),
    one.usedBy.length > 0 && h('p', { class: 'meta clamp', dir: 'auto', text: t('usedBy', { names: one.usedBy.map((id) => state.agents.get(id)?.name ?? id).join(t('comma')) }) }),
    one.problems.filter((problem) => !isListed(problem)).map((problem) => h('p', { class: 'inline-error', dir: 'auto', text: settingProblem(problem) })),
    outcome,
    h('p', { class: 'item-foot' }, test, !one.tour && button({ class: 'plain-btn', text: t('edit'), 'aria-label': t('editThis', { name: one.name }), onclick: () => edit(one) }), !one.tour && remove),
  );
}

function table(items) {
  const has = (one, name) => ['input', 'output'].filter((way) => one.capabilities[way].includes(name)).map((way) => t(`way_${way}`)).join(' + ');
  const label = (name) => (CAPABILITIES.includes(name) ? t(`can_${name}`) : name);
  const custom = items.flatMap((one) => [...one.capabilities.input, ...one.capabilities.output]).filter((name) => !CAPABILITIES.includes(name));
  const names = [...CAPABILITIES, ...new Set(custom)];
  return section(
    'setup-caps',
    t('setupCapabilities'),
    h(
      'div',
      { class: 'table-frame', tabindex: '0', role: 'group', 'aria-labelledby': 'setup-caps' },
      h(
        'table',
        {},
        h('thead', {}, h('tr', {}, h('th', { scope: 'col', text: t('service') }), names.map((name) => h('th', { scope: 'col', text: label(name) })))),
        h('tbody', {}, items.map((one) => h('tr', {}, h('th', { scope: 'row' }, h('span', { dir: 'auto', text: one.name }), one.capabilities.source === 'inferred' && h('span', { class: 'meta', text: ` (${t('inferred')})` })), names.map((name) => h('td', { text: has(one, name), data: { of: label(name) } }))))),
      ),
    ),
  );
}

// Services that could be set up

function offers(found, { use, probe }) {
  const look = button({ class: 'plain-btn', text: t('setupProbe'), onclick: () => busy(look, probe) });
  return section(
    'setup-found',
    t('setupFound'),
    found.length ? null : h('p', { class: 'meta', text: t('setupFoundNone') }),
    h('ul', { class: 'items' }, found.map((one) => h('li', { class: 'item' }, h('span', { text: one.name }), ' ', h('span', { class: 'meta', text: one.apiKey ? t('keyInEnvironment', { name: one.apiKey.slice(2, -1) }) : one.baseURL }), ' ', button({ class: 'text-btn', text: t('use'), 'aria-label': t('useThis', { name: one.name }), onclick: () => use(one) })))),
    look,
  );
}

// Ids are never reused: terminated agents keep theirs.
function unused(id) {
  for (let n = 1; ; n += 1) {
    const tried = n > 1 ? `${id}-${n}` : id;
    if (!state.agents.has(tried)) return tried;
  }
}

// The tour: active while there is no service, and on request beside one.

function tour(items, changed) {
  const alone = items.every((one) => one.tour);
  const agents = [...state.agents.values()];
  const guided = agents.find((one) => one.id.startsWith(GUIDE) && one.service === 'tour' && one.state !== 'terminated');
  const beside = !alone && guided;
  const flip = async (wanted) => {
    try {
      if (wanted) {
        await put('/services/tour', { name: t('tour'), provider: 'tour', baseURL: 'http://127.0.0.1', model: 'tour', capabilities: { input: ['text'], output: ['text', 'tool_calling'] } });
        await post('/agents', { id: unused(GUIDE), name: t('tourGuide'), prompt: '', service: 'tour' });
      } else {
        await del(`/agents/${guided.id}`);
        await del('/services/tour');
      }
    } catch (error) {
      oops(error);
    }
    await changed();
  };
  return section(
    'setup-tour',
    t('tour'),
    alone ? h('p', { class: 'meta', text: t('tourAlone') }) : toggle(t('tourOn'), Boolean(beside), flip),
  );
}

// What is stored, and how long

async function showStorage(root) {
  try {
    fill(root, storage(await get('/storage')));
  } catch {
    fill(root, failed(t('notLoaded'), () => showStorage(root)));
  }
}

function storage({ fileBytes, artifactBytes, rows, oldest, keepDays, keepGb, canShrink, lastPrune }) {
  const kept = [keepDays && t('keptDays', { n: count(keepDays) }), keepGb && t('keptGb', { n: count(keepGb) })].filter(Boolean);
  const line = (name, ...value) => [h('dt', { text: name }), h('dd', {}, value)];
  return section(
    'setup-storage',
    t('storage'),
    h(
      'dl',
      { class: 'pairs' },
      line(t('storageSize'), t('storageSizes', { database: bytes(fileBytes), files: bytes(artifactBytes) })),
      line(t('storageRows'), t('storageCounts', { messages: count(rows.messages), tasks: count(rows.tasks), history: count(rows.history) })),
      line(t('storageOldest'), oldest ? when(oldest) : '–'),
      line(t('storageKept'), kept.length ? kept.join(' · ') : t('keptForever')),
      line(t('storagePruned'), lastPrune ? [when(lastPrune.at), ' · ', t('storageDeleted', { n: count(lastPrune.deleted.messages) })] : t('storageNotPruned')),
    ),
    canShrink ? null : h('p', { class: 'meta', text: t('storageRewrite') }),
  );
}
