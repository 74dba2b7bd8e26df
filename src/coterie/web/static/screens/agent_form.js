// The form of one agent, and the form of a team from a template. What is typed survives a reload of the page.

import { patch, post } from '../api.js';
import { avatar, button, fill, h, TINTS } from '../dom.js';
import { reasonOf, t, toolDoes } from '../i18n.js';
import { oops, toast } from '../notices.js';
import { agentPath, go } from '../router.js';
import { nameOf, resync } from '../state.js';
import { choices, modelOf, newPath, pagePath, retireAgent } from './agents.js';
import { busy, choice, field, newName } from './parts.js';

const FIELDS = ['name', 'role', 'description', 'prompt', 'service', 'tools', 'parent', 'colour', 'initials'];
const EMPTY = { name: '', role: '', description: '', prompt: '', service: null, tools: ['*'], parent: null, colour: null, initials: '' };
const MESSENGER = 'send_message';
const same = (one, other) => JSON.stringify(one ?? null) === JSON.stringify(other ?? null);

const kept = (id, from) => `coterie.form.${id ?? ['new', from.name].join('.')}`;

/** Reads the agents again. A failure must not look like a failed save: a second one would create a second agent. */
const refresh = () => resync().catch(() => {});

/** `fields`: what was typed and not saved; `before`: the same fields of the definition that they were typed for. */
function readKept(key) {
  const none = { fields: {}, before: {} };
  try {
    return { ...none, ...JSON.parse(sessionStorage.getItem(key)) };
  } catch {
    return none;
  }
}

/** `from`: the definition to change, to copy or of a template. `id`: null for a new agent. */
export function agentForm(root, { from, id, known, tools, services, templates }) {
  const key = kept(id, from);
  const before = { ...EMPTY, ...Object.fromEntries(FIELDS.filter((name) => from[name] !== undefined).map((name) => [name, from[name]])) };
  const { fields: typed, before: base } = readKept(key);
  const overwrites = Boolean(id) && Object.keys(typed).some((name) => !same(base[name], before[name]) && !same(typed[name], before[name]));
  const now = { ...before, ...typed };
  let version = known.version;

  const problem = h('p', { class: 'inline-error', role: 'alert', hidden: !overwrites, text: overwrites ? t('definitionsChanged') : '' });
  const preview = h('span', { class: 'avatar-preview' });
  const changed = () => {
    const different = Object.fromEntries(FIELDS.filter((name) => !same(now[name], before[name])).map((name) => [name, now[name]]));
    const typedFor = Object.fromEntries(Object.keys(different).map((name) => [name, name in base ? base[name] : before[name]]));
    if (Object.keys(different).length) sessionStorage.setItem(key, JSON.stringify({ fields: different, before: typedFor }));
    else sessionStorage.removeItem(key);
    fill(preview, avatar({ ...now, id: id ?? now.name }));
    return different;
  };
  const text = (name, props = {}) => {
    const input = h(props.rows ? 'textarea' : 'input', { autocomplete: 'off', dir: 'auto', 'data-testid': `agent-${name}`, ...props });
    input.value = now[name] ?? '';
    input.addEventListener('input', () => {
      now[name] = input.value;
      changed();
    });
    return input;
  };
  const name = text('name', { type: 'text', required: true, maxlength: '200' });
  const model = choice([['', services[0] ? t('modelFirst', { name: modelOf(null, services) }) : t('modelNone')], ...services.map((one) => [one.id, modelOf(one.id, services)])], now.service ?? '', (value) => {
    now.service = value || null;
    changed();
  });
  model.dataset.testid = 'agent-service';
  const below = known.items.filter((one) => one.id !== id);
  const parent = choice([['', t('parentNone')], ...below.map((one) => [one.id, one.name])], now.parent ?? '', (value) => {
    now.parent = value || null;
    changed();
  });

  const save = h('button', { type: 'submit', class: 'primary', 'data-testid': 'agent-save', text: t(id ? 'save' : 'agentCreate') });
  const leave = (path) => {
    sessionStorage.removeItem(key);
    go(path);
  };
  const write = async () => {
    problem.hidden = true;
    try {
      if (id) {
        await patch(`/definitions/${encodeURIComponent(id)}`, { ...changed(), version });
        toast({ text: t('agentSaved', { name: now.name }) });
      } else {
        const fields = Object.fromEntries(FIELDS.filter((one) => !same(now[one], EMPTY[one])).map((one) => [one, now[one]]));
        ({ ids: [created] } = await post('/definitions', { agents: [fields] }));
        toast({ text: t('agentCreated', { name: now.name }) });
      }
      await refresh();
      leave(id ? pagePath(id) : agentPath(created));
    } catch (error) {
      await refused(error);
    }
  };
  let created = null;
  const refused = async (error) => {
    const conflict = error.code === 'definitions_changed';
    if (!conflict && error.code !== 'agent_invalid' && error.code !== 'config_invalid') return oops(error);
    problem.hidden = false;
    problem.textContent = conflict ? t('definitionsChanged') : reasonOf(error);
    if (conflict) ({ known: { version } } = await choices()); // a second save is meant for the newer version
    problem.scrollIntoView?.({ block: 'nearest' });
  };

  const form = h('form', { class: 'agent-form', 'aria-label': t(id ? 'agentEdit' : 'agentsNew'), onsubmit: (event) => {
    event.preventDefault();
    busy(save, write);
  } },
  h('header', { class: 'agent-form-head' }, preview, h('h2', { text: id ? t('editThis', { name: nameOf(id) }) : t('agentsNew') }),
    Object.keys(typed).length > 0 && h('p', { class: 'meta', 'data-testid': 'form-restored' }, t('formRestored'), ' ', button({ class: 'text-btn', text: t('formDiscard'), onclick: () => {
      sessionStorage.removeItem(key);
      root.replaceChildren();
      agentForm(root, { from, id, known, tools, services, templates });
      root.querySelector('input')?.focus();
    } }))),
  !id && !from.name && h('nav', { class: 'template-row', 'aria-label': t('templatesUse') }, h('span', { class: 'meta', text: t('templatesUse') }), templates.map((one) => h('a', { class: 'plain-btn link-btn', href: newPath({ template: one.id }), text: one.name }))),
  h('div', { class: 'form-pair' }, field(t('agentField_name'), name), field(t('agentField_role'), text('role', { type: 'text', maxlength: '60' }), t('roleHint'))),
  field(t('agentField_description'), text('description', { rows: '2', maxlength: '500' }), t('descriptionHint')),
  field(t('agentField_prompt'), text('prompt', { rows: '9' }), t('promptHint')),
  h('div', { class: 'form-pair' }, field(t('agentField_service'), model), field(t('agentField_parent'), parent, t('parentHint'))),
  toolPicker(tools, now, changed),
  look(now, changed, text),
  problem,
  h('div', { class: 'modal-foot form-foot' },
    id && button({ class: 'text-btn danger', text: t('retire'), onclick: () => retireAgent({ id, name: before.name }, version, () => leave('#/agents')) }),
    button({ class: 'plain-btn', text: t('cancel'), onclick: () => leave(id ? pagePath(id) : '#/agents') }), save));
  fill(root, form);
  changed();
  name.focus();
  return () => {};
}

// Tools: all, chosen ones, or none

/** True if the pattern names the tool: `*`, `?` and `[a-z]` as in a shell. */
function matches({ name }, pattern) {
  const parts = pattern.replace(/\[(!?)(\]?[^\]]*)\]|[^]/g, (part, not, set) => {
    if (set !== undefined) return `[${not ? '^' : ''}${set.replace(/[\\\]^[]/g, '\\$&')}]`;
    return part === '*' ? '.*' : part === '?' ? '.' : part.replace(/[\\^$.|+()[\]{}/]/, '\\$&');
  });
  try {
    return new RegExp(`^${parts}$`, 's').test(name);
  } catch {
    return false; // such as [z-a]
  }
}

const included = (patterns) => patterns.filter((one) => !one.startsWith('!'));
const excluded = (patterns) => patterns.filter((one) => one.startsWith('!')).map((one) => one.slice(1));

/** True if the patterns allow the tool, by the rules of the server. */
function isAllowed(tool, patterns) {
  if (!patterns.length || excluded(patterns).some((one) => matches(tool, one))) return false;
  const named = included(patterns);
  return tool.builtIn || !named.length || named.some((one) => matches(tool, one));
}

/**
 * Patterns for the chosen tools, with those of `before` that still say the same, or match no tool that runs now: a server
 * that is down keeps its place. A list that only excludes would allow all others, so the result names one tool at least.
 */
function patternsOf(chosen, tools, before) {
  const isChosen = (tool) => chosen.has(tool.name);
  const among = (tool, patterns) => patterns.some((one) => matches(tool, one));
  const without = excluded(before).filter((one) => !tools.some((tool) => isChosen(tool) && matches(tool, one)));
  without.push(...tools.filter((tool) => tool.builtIn && !isChosen(tool) && !among(tool, without)).map((tool) => tool.name));
  const named = before.length && !included(before).length ? ['*'] : included(before);
  const kept = named.filter((one) => one !== MESSENGER && tools.every((tool) => isChosen(tool) || !matches(tool, one) || among(tool, without)));
  const names = [...kept, ...tools.filter((tool) => !tool.builtIn && isChosen(tool) && !among(tool, kept)).map((tool) => tool.name)];
  return [...(names.length ? names : [MESSENGER]), ...without.map((one) => `!${one}`)];
}

function toolPicker(tools, now, changed) {
  const mode = () => (!now.tools.length ? 'none' : same(now.tools, ['*']) ? 'all' : 'some');
  const chosen = new Set(tools.filter((one) => mode() !== 'some' || isAllowed(one, now.tools)).map((one) => one.name));
  let patterns = mode() === 'some' ? now.tools : [];
  const choose = () => (now.tools = patterns = patternsOf(chosen, tools, patterns));
  const rows = h('div', { class: 'tool-rows' });
  const group = newName('tools');

  const draw = () => {
    const sources = [...new Set(tools.map((one) => one.source))];
    rows.hidden = mode() !== 'some';
    fill(rows, sources.map((source) => h('fieldset', { class: 'tool-group' }, h('legend', { text: sourceName(source) }), tools.filter((one) => one.source === source).map(toolRow))));
  };
  const toolRow = (one) => {
    const box = h('input', { type: 'checkbox', 'data-testid': `tool-${one.name}` });
    box.checked = chosen.has(one.name);
    box.addEventListener('change', () => {
      chosen[box.checked ? 'add' : 'delete'](one.name);
      choose();
      changed();
    });
    return h('label', { class: 'tool-row' }, box, h('span', { class: 'tool-words' }, h('code', { text: one.name }), one.approval && h('span', { class: 'tag asks', text: t('asksFirst') }),
      h('span', { class: 'meta', dir: 'auto', text: toolDoes(one) })));
  };
  const pick = (value) => {
    if (value === 'some') choose();
    else now.tools = value === 'all' ? ['*'] : [];
    changed();
    draw();
  };
  draw();
  return h('fieldset', { class: 'abilities', 'data-testid': 'agent-tools' }, h('legend', { text: t('agentField_tools') }),
    ['all', 'some', 'none'].map((value) => {
      const radio = h('input', { type: 'radio', name: group, value });
      radio.checked = mode() === value;
      radio.addEventListener('change', () => pick(value));
      return h('label', { class: 'check' }, radio, h('span', { text: t(`tools_${value}`) }));
    }), rows);
}

const sourceName = (source) => (source === 'built-in' ? t('toolsBuiltIn') : source === 'tools' ? t('toolsOwn') : t('toolsServer', { name: source.replace(/^mcp\./, '') }));

// Colour and initials

function look(now, changed, text) {
  const group = newName('tint');
  const initials = text('initials', { type: 'text', maxlength: '3', class: 'short' });
  return h('fieldset', { class: 'abilities' }, h('legend', { text: t('agentLook') }),
    h('div', { class: 'tints', role: 'radiogroup', 'aria-label': t('agentField_colour') }, ['', ...TINTS].map((tint) => {
      const radio = h('input', { type: 'radio', name: group, value: tint, class: 'vh' });
      radio.checked = (now.colour ?? '') === tint;
      radio.addEventListener('change', () => {
        now.colour = tint || null;
        changed();
      });
      const word = t(`tint_${tint || 'auto'}`);
      return h('label', { class: ['swatch', tint ? `tint-${tint}` : 'swatch-auto'].join(' '), title: word }, radio, h('span', { class: 'vh', text: word }));
    })),
    field(t('agentField_initials'), initials, t('initialsHint')));
}

// A team

/** Several agents of a template: names can be changed, and all are created together. */
export function teamForm(root, { template, services }) {
  const agents = template.agents.map((one) => ({ ...one }));
  let service = null;
  const save = h('button', { type: 'submit', class: 'primary', 'data-testid': 'team-save', text: t('teamCreate') });
  const write = async () => {
    const { ids } = await post('/definitions', { agents: agents.map((one) => ({ ...one, ...(service && { service }) })) });
    toast({ text: t('teamCreated', { names: agents.map((one) => one.name).join(t('comma')) }) });
    await refresh();
    go(agentPath(ids[0]));
  };
  const row = (one) => {
    const name = h('input', { type: 'text', required: true, maxlength: '200', dir: 'auto', value: one.name, 'data-testid': 'team-name' });
    const face = h('span', {}, avatar(one));
    name.addEventListener('input', () => {
      one.name = name.value;
      fill(face, avatar(one));
    });
    return h('li', { class: 'item team-row' }, face, h('div', { class: 'definition-words' }, field(t('agentField_name'), name),
      h('p', { class: 'meta', dir: 'auto', text: one.description }), h('details', {}, h('summary', { text: t('agentField_prompt') }), h('p', { class: 'as-typed', dir: 'auto', text: one.prompt }))));
  };
  const model = choice([['', services[0] ? t('modelFirst', { name: modelOf(null, services) }) : t('modelNone')], ...services.map((one) => [one.id, modelOf(one.id, services)])], '', (value) => {
    service = value || null;
  });
  fill(root, h('form', { class: 'agent-form', 'aria-label': template.name, onsubmit: (event) => {
    event.preventDefault();
    busy(save, write);
  } }, h('h2', { text: template.name }), h('p', { class: 'meta', text: template.about }), h('ul', { class: 'items' }, agents.map(row)), field(t('agentField_service'), model),
  h('div', { class: 'modal-foot form-foot' }, button({ class: 'plain-btn', text: t('cancel'), onclick: () => go('#/agents') }), save)));
  root.querySelector('input')?.focus();
  return () => {};
}
