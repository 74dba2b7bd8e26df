// Agents as their owner describes them: the list, templates, and the history of changes with undo.
// `#/agents/new` and `#/agents/<id>/edit` show the form, `#/agents/<id>` the page of one agent.

import { del, get, post, query } from '../api.js';
import { avatar, button, empty, fill, h } from '../dom.js';
import { dayAndTime, lang, reasonOf, t } from '../i18n.js';
import { oops, toast } from '../notices.js';
import { agentPath, go } from '../router.js';
import { on, resync, state } from '../state.js';
import { busy, confirm, failed, section, styled } from './parts.js';

await styled('/static/screens/agents.css');

export const editPath = (id) => `#/agents/${encodeURIComponent(id)}/edit`;
export const pagePath = (id) => `#/agents/${encodeURIComponent(id)}`;
export const newPath = (values) => `#/agents/new?${new URLSearchParams(values)}`;

export function render(root, { args, query: asked }) {
  const [id, how] = args;
  if (id && id !== 'new' && !how) return later(root, import('./agent_page.js'), (module) => module.agentPage(root, id));
  if (id) return later(root, import('./agent_form.js'), (module) => form(root, module, id === 'new' ? null : id, asked));
  return list(root);
}

/** Shows what a module draws, unless the screen was left meanwhile. */
function later(root, loading, draw) {
  let leave = null;
  let gone = false;
  loading.then(async (module) => {
    if (!gone) leave = (await draw(module)) ?? null;
    if (gone) leave?.();
  }).catch((error) => !gone && fill(root, failed(reasonOf(error) ?? t('notLoaded'), () => go(location.hash))));
  return () => {
    gone = true;
    leave?.();
  };
}

/** What the forms offer: definitions, tools, services and templates. */
export async function choices() {
  const [known, tools, services, templates] = await Promise.all([get('/definitions'), get('/tools'), get('/services'), query('/templates', { language: lang() })]);
  return { known, tools: tools.items, services: services.items, templates: templates.items };
}

async function form(root, { agentForm, teamForm }, id, asked) {
  const offered = await choices();
  const { known, templates } = offered;
  const find = (one) => known.items.find((each) => each.id === one);
  if (id) {
    const there = find(id);
    if (!there) return void fill(root, empty(t('noDefinition', { name: state.agents.get(id)?.name ?? id }), h('a', { href: '#/agents' }, t('agents'))));
    return agentForm(root, { ...offered, from: there, id });
  }
  const template = templates.find((one) => one.id === asked.get('template'));
  if (template?.agents.length > 1) return teamForm(root, { ...offered, template });
  const copied = find(asked.get('from'));
  const from = copied ? { ...copied, name: t('copyOf', { name: copied.name }) } : template?.agents[0] ?? {};
  return agentForm(root, { ...offered, from, id: null });
}

// The list

function list(root) {
  const body = h('div', { class: 'definitions' });
  let gone = false;
  fill(root, body);

  const load = async () => {
    try {
      const [offered, changes] = await Promise.all([choices(), get('/definitions/changes')]);
      if (!gone) draw(offered, changes.items);
    } catch (error) {
      if (!gone) fill(body, failed(error.status ? reasonOf(error) : t('notLoaded'), load));
    }
  };
  const draw = ({ known, services, templates }, changes) => fill(
    body,
    section('agents-new', t('agentsNew'), templateCards(templates)),
    section('agents-all', t('agents'), h('ul', { class: 'items' }, known.items.map((one) => card(one, { services, version: known.version, load })))),
    retiredSection(known.items),
    section('agents-changes', t('agentChanges'), changes.length ? h('ol', { class: 'items' }, changes.slice(0, 50).map((one) => changeRow(one, load))) : h('p', { class: 'meta', text: t('agentChangesNone') })),
  );
  load();
  const end = on('snapshot', load);
  return () => {
    gone = true;
    end();
  };
}

export const templateCards = (templates) =>
  h('ul', { class: 'template-cards' },
    [...templates.map((one) => [newPath({ template: one.id }), one.name, one.about, one.agents]), ['#/agents/new', t('agentBlank'), t('agentBlankAbout'), []]].map(([href, name, about, agents]) =>
      h('li', {}, h('a', { class: 'card template-card', href, 'data-testid': 'template' },
        h('span', { class: 'avatars' }, agents.length ? agents.map(avatar) : h('span', { class: 'avatar tint-grey', 'aria-hidden': 'true' }, '+')),
        h('span', { class: 'template-name', text: name }), h('span', { class: 'meta', text: about })))));

export const modelOf = (service, services) => {
  const one = services.find((each) => each.id === service) ?? (service ? null : services[0]);
  return one ? [one.name, !one.tour && one.model].filter(Boolean).join(' · ') : service;
};

function card(one, { services, version, load }) {
  const retire = button({ class: 'text-btn danger', text: t('retire'), 'aria-label': t('retireThis', { name: one.name }), 'data-testid': 'retire', onclick: () => retireAgent(one, version, load) });
  return h('li', { class: 'item definition', data: { definition: one.id } },
    avatar(one),
    h('div', { class: 'definition-words' },
      h('p', { class: 'item-head' }, h('a', { href: pagePath(one.id), dir: 'auto', text: one.name }), one.role && h('span', { class: 'tag', dir: 'auto', text: one.role })),
      one.description && h('p', { class: 'item-text', dir: 'auto', text: one.description }),
      h('p', { class: 'meta' }, [modelOf(one.service, services), t('toolCount', { n: one.given.length })].filter(Boolean).join(' · '))),
    h('p', { class: 'definition-acts' },
      h('a', { class: 'text-btn', href: agentPath(one.id), 'aria-label': t('talkTo', { name: one.name }), text: t('talk') }),
      h('a', { class: 'text-btn', href: editPath(one.id), 'aria-label': t('editThis', { name: one.name }), 'data-testid': 'edit-agent', text: t('edit') }),
      h('a', { class: 'text-btn', href: newPath({ from: one.id }), 'aria-label': t('duplicateThis', { name: one.name }), text: t('duplicate') }),
      retire));
}

/** Asks, retires the agent and offers to take it back. */
export async function retireAgent({ id, name }, version, done) {
  if (!(await confirm(t('retireSure', { name }), t('retire'), t('retireMeans')))) return;
  try {
    await del(`/definitions/${encodeURIComponent(id)}?${new URLSearchParams({ version })}`);
    toast({ text: t('retiredIt', { name }) });
    await resync();
    await done();
  } catch (error) {
    oops(error);
    if (error.code === 'definitions_changed') await done();
  }
}

function retiredSection(defined) {
  const known = new Set(defined.map((one) => one.id));
  const gone = [...state.agents.values()].filter((one) => one.retired && !known.has(one.id));
  return gone.length > 0 && section('agents-retired', t('agentsRetired'), h('p', { class: 'meta', text: t('retiredHow') }),
    h('ul', { class: 'items' }, gone.map((one) => h('li', { class: 'item definition' }, avatar(one), h('a', { href: agentPath(one.id), dir: 'auto', text: one.name })))));
}

// History

function changeRow(change, load) {
  const what = change.agents.map((one) => {
    const fields = change.kind === 'changed' || change.kind === 'undone' ? one.fields.map(({ name }) => t(`agentField_${name}`)).join(t('comma')) : '';
    return fields ? `${one.name} (${fields})` : one.name;
  }).join(t('comma'));
  const kind = t(`change_${change.kind}`);
  const undo = button({ class: 'text-btn', text: t('undo'), 'aria-label': t('undoThis', { what: `${kind} ${what}` }), 'data-testid': 'undo', onclick: () => busy(undo, async () => {
    await post(`/definitions/changes/${encodeURIComponent(change.id)}/undo`);
    toast({ text: t('undone') });
    await resync();
    await load();
  }) });
  return h('li', { class: 'item change-row', data: { change: change.id } },
    h('span', { class: 'tag', text: kind }), h('span', { class: 'change-what', dir: 'auto', text: what }), h('time', { class: 'meta', datetime: change.at, text: dayAndTime(change.at) }),
    change.canUndo ? undo : null);
}

