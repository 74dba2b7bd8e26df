// Keys of other programs: list, make and revoke them. Settings of common clients to copy.

import { del, get, post } from '../api.js';
import { button, fill, h } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';
import { copyText, oops } from '../notices.js';
import { state } from '../state.js';
import { busy, confirm, failed, field, section, table, toggle } from './parts.js';

const DOORS = ['openai', 'mcp', 'a2a'];

/** Settings to copy: door, name of the client, text. */
const clients = (origin, token, model) => [
  ['openai', 'openai (Python)', `OpenAI(base_url="${origin}/v1", api_key="${token}")  # model="${model}"`],
  ['openai', 'SDKs', `OPENAI_BASE_URL=${origin}/v1\nOPENAI_API_KEY=${token}`],
  ['openai', 'llm', `# extra-openai-models.yaml, then: llm keys set coterie\n- model_id: ${model}\n  model_name: ${model}\n  api_base: ${origin}/v1\n  api_key_name: coterie`],
  ['openai', 'Open WebUI', `${origin}/v1\n${token}`],
  ['mcp', 'Claude Code', `claude mcp add --transport http coterie ${origin}/mcp --header "Authorization: Bearer ${token}"`],
  ['mcp', 'Codex', `# ~/.codex/config.toml, with COTERIE_KEY=${token}\n[mcp_servers.coterie]\nurl = "${origin}/mcp"\nbearer_token_env_var = "COTERIE_KEY"`],
];

export async function showPrograms(root) {
  try {
    const { items } = await get('/keys');
    draw(root, items);
  } catch {
    fill(root, failed(t('notLoaded'), () => showPrograms(root)));
  }
}

function draw(root, items, made) {
  const form = h('div');
  const add = button({ class: 'plain-btn', 'data-testid': 'add-key', text: t('keyAdd'), onclick: () => ask(root, form) });
  fill(
    root,
    section(
      'setup-programs',
      t('programs'),
      h('p', { class: 'meta', text: t('programsAbout') }),
      items.length ? list(root, items) : null,
      made ? settingsOf(made) : null,
      h('div', { class: 'item-foot' }, add),
      form,
    ),
  );
}

function list(root, items) {
  const rows = items.map((key) => [
    key.name,
    key.agents?.join(', ') ?? t('keyAllAgents'),
    key.doors.join(', '),
    key.usedAt ? dayAndTime(key.usedAt) : t('keyNeverUsed'),
    key.revokedAt ? t('keyRevoked', { time: dayAndTime(key.revokedAt) }) : t('keyActive'),
  ]);
  const revokes = items.filter((key) => !key.revokedAt).map((key) =>
    button({ class: 'text-btn danger', text: t('keyRevoke', { name: key.name }), onclick: () => revoke(root, key.name) }));
  return [
    table('setup-programs', [t('keyName'), t('keyReaches'), t('keyDoors'), t('keyUsed'), t('keyState')], rows),
    h('div', { class: 'item-foot' }, revokes),
  ];
}

async function revoke(root, name) {
  if (!(await confirm(t('keyRevokeAsk', { name }), t('keyRevokeYes'), t('keyRevokeMeans')))) return;
  try {
    await del(`/keys/${encodeURIComponent(name)}`);
  } catch (error) {
    oops(error);
  }
  await showPrograms(root);
}

function ask(root, form) {
  const name = h('input', { type: 'text', autocomplete: 'off', maxlength: '64', required: '' });
  const agents = h('input', { type: 'text', autocomplete: 'off' });
  const doors = new Set(DOORS);
  const make = button({ class: 'primary', 'data-testid': 'make-key', text: t('keyMake') });
  make.addEventListener('click', () =>
    busy(make, async () => {
      const ids = agents.value.split(',').map((id) => id.trim()).filter(Boolean);
      const made = await post('/keys', { name: name.value.trim(), agents: ids.length ? ids : null, doors: [...doors] });
      draw(root, (await get('/keys')).items, made);
      root.querySelector('[data-testid=key-token]')?.focus();
    }));
  fill(
    form,
    field(t('keyName'), name, t('keyNameHint')),
    field(t('keyReaches'), agents, t('keyReachesHint')),
    DOORS.map((door) => toggle(t(`door_${door}`), true, (on) => (on ? doors.add(door) : doors.delete(door)))),
    h('div', { class: 'item-foot' }, make),
  );
  name.focus();
}

/** The token, which is shown this once, and what to paste where. */
function settingsOf({ name, token, doors, agents }) {
  const model = agents?.[0] ?? [...state.agents.keys()][0] ?? 'assistant';
  const fitting = clients(location.origin, token, model).filter(([door]) => doors.includes(door));
  const line = (label, text, extra = {}) =>
    h('div', { class: 'form-field' }, h('span', { class: 'meta', text: label }),
      h('pre', { tabindex: '0', ...extra }, h('code', { text })),
      button({ class: 'text-btn', text: t('copy'), 'aria-label': `${t('copy')}: ${label}`, onclick: () => copyText(text) }));
  return h('div', { 'data-testid': 'key-made' },
    h('p', { text: t('keyMade', { name }) }),
    line(t('keyToken'), token, { 'data-testid': 'key-token' }),
    fitting.map(([, client, text]) => line(client, text)));
}
