// One agent: what it is, its model, tools, files, scheduled messages, cost, and what it remembers.

import { get, query } from '../api.js';
import { avatar, button, empty, fileIcon, fill, h } from '../dom.js';
import { bytes, count, dayAndTime, many, recurrence, t, toolDoes } from '../i18n.js';
import { agentPath } from '../router.js';
import { on, plainText, state, takes } from '../state.js';
import { doing, dot } from '../agents_list.js';
import { who } from '../message.js';
import { costWords } from '../task_line.js';
import { editPath, modelOf, retireAgent } from './agents.js';
import { busy, failed, section } from './parts.js';

const DAYS = 30;

/** Draws the page; resolves to the function that leaves it. */
export async function agentPage(root, id) {
  const body = h('div', { class: 'agent-page' });
  const path = encodeURIComponent(id);
  let gone = false;

  const load = async () => {
    try {
      const [one, defined, tools, services, usage, due, schedules, files] = await Promise.all([
        get(`/agents/${path}`), get('/definitions').catch(() => ({ items: [] })), query('/tools', { agent: id }).catch(() => ({ items: [] })), get('/services'), query('/usage', { days: DAYS }),
        query('/delayed', { recipient: id, limit: 20 }), query('/schedules', { recipient: id, limit: 50 }), query('/artifacts', { agent: id, limit: 10 }),
      ]);
      if (!gone) draw(one, { defined, tools: tools.items, services: services.items, usage: usage.items.filter((row) => row.agent === id), due, schedules: schedules.items, files: files.items });
    } catch (error) {
      if (!gone) fill(body, error.code === 'unknown_agent' ? empty(t('noSuchAgent', { name: id }), h('a', { href: '#/agents' }, t('agents'))) : failed(t('notLoaded'), load));
    }
  };

  const draw = (one, { defined, tools, services, usage, due, schedules, files }) => {
    const definition = defined.items.find((each) => each.id === id);
    const parent = one.parent && state.agents.get(one.parent);
    const facts = [
      [t('agentField_role'), one.role],
      [t('agentField_service'), one.remote ? t('agentRemote') : one.service ? modelOf(one.service, services) : t('modelNone')],
      [t('takesIn'), takes(one).map((kind) => t(`can_${kind}`)).join(' · ')],
      [t('agentField_parent'), parent?.name ?? one.parent],
      [t('pageWaiting'), one.waiting > 0 && count(one.waiting)],
    ].filter(([, value]) => value);
    fill(body,
      h('header', { class: 'agent-head' }, avatar(one), h('div', { class: 'definition-words' }, h('h2', { dir: 'auto', text: one.name }),
        h('p', { class: 'meta agent-doing' }, dot(one), h('span', { text: doing(one) })), one.description && h('p', { dir: 'auto', text: one.description })),
      h('p', { class: 'definition-acts' },
        h('a', { class: 'plain-btn link-btn', href: agentPath(id), text: t('talk') }),
        definition && h('a', { class: 'plain-btn link-btn', href: editPath(id), 'data-testid': 'page-edit', text: t('edit') }),
        definition && button({ class: 'text-btn danger', text: t('retire'), 'aria-label': t('retireThis', { name: one.name }), onclick: () => retireAgent(definition, defined.version, load) }))),
      h('dl', { class: 'pairs agent-facts' }, facts.map(([name, value]) => [h('dt', { text: name }), h('dd', { dir: 'auto', text: value })])),
      section('page-cost', t('pageCost', { n: DAYS }), cost(usage)),
      section('page-tools', t('agentField_tools'), tools.length ? h('ul', { class: 'tool-list' }, tools.map(tool)) : h('p', { class: 'meta', text: t('tools_none') })),
      definition?.prompt && section('page-prompt', t('agentField_prompt'), h('p', { class: 'card as-typed', dir: 'auto', text: definition.prompt })),
      section('page-due', t('delayed'), scheduled(due.items, schedules)),
      section('page-files', t('artifacts'), files.length ? h('ul', { class: 'items' }, files.map(file)) : h('p', { class: 'meta', text: t('artifactsNone') })),
      memory(path),
    );
  };
  fill(root, body);
  await load();
  const end = on([`agent:${id}`, 'delayed'], soon);
  let timer = null;
  function soon() {
    timer ??= setTimeout(() => {
      timer = null;
      // An open history must not close under the reader.
      if (!gone && !body.querySelector('details[open]') && !body.contains(document.activeElement)) load();
    }, 500);
  }
  return () => {
    gone = true;
    clearTimeout(timer);
    end();
  };
}

const tool = (one) => h('li', { class: 'tool-words' }, h('code', { text: one.name }), one.approval && h('span', { class: 'tag asks', text: t('asksFirst') }), h('span', { class: 'meta', dir: 'auto', text: toolDoes(one) }));

function cost(rows) {
  const sum = (key) => rows.reduce((total, row) => total + (row[key] ?? 0), 0);
  if (!rows.length) return h('p', { class: 'meta', text: t('usageNone') });
  const priced = rows.find((row) => row.currency);
  const money = priced && costWords({ cost: sum('cost'), currency: priced.currency, unpricedRequests: sum('unpricedRequests') });
  const words = [many('requests', sum('requests')), t('tokensSplit', { input: count(sum('inputTokens')), output: count(sum('outputTokens')) }), money].filter(Boolean);
  return h('p', {}, words.join(' · '), ' ', h('a', { href: '#/tasks?view=usage', text: t('details') }));
}

function scheduled(due, schedules) {
  const paused = schedules.filter((one) => one.state === 'paused');
  if (!due.length && !paused.length) return h('p', { class: 'meta', text: t('delayedNone') });
  return [h('ul', { class: 'items' }, [...due.map((one) => [one, dayAndTime(one.deliverAt)]), ...paused.map((one) => [one, t('paused')])].map(([one, when]) =>
    h('li', { class: 'item' }, h('p', { class: 'item-head' }, h('span', { dir: 'auto', text: who(one.from) }), h('span', { class: 'meta', text: when })), h('p', { class: 'item-text clamp', dir: 'auto', text: plainText(one) || t('noText') }),
      one.every && h('span', { class: 'tag', dir: 'auto', text: t('recurs', { every: recurrence(one.every) }) })))), h('p', {}, h('a', { href: '#/delayed', text: t('edit') }))];
}

const file = (one) => h('li', { class: 'item' }, h('a', { class: 'item-link file-link', href: `#/artifacts/${encodeURIComponent(one.artifactRef)}` }, fileIcon(one.type),
  h('span', {}, h('span', { class: 'item-text', dir: 'auto', text: one.filename }), ' ', h('span', { class: 'meta', text: `${bytes(one.size)} · ${dayAndTime(one.createdAt)}` }))));

/** What the agent's model sees with its next request: the system prompt and its history, loaded when it is opened. */
function memory(path) {
  const list = h('ol', { class: 'items' });
  const more = button({ class: 'plain-btn', hidden: true, text: t('pageMore'), onclick: () => busy(more, load) });
  let next;
  const load = async () => {
    const page = await query(`/agents/${path}/history`, { after: next, limit: 50 });
    list.append(...page.items.map((one) => h('li', { class: 'item' }, h('p', { class: 'item-head' }, h('span', { text: one.from ? who(one.from) : t(`memory_${one.role}`) })),
      h('p', { class: 'item-text', dir: 'auto', text: one.content || (one.calls ?? []).map((call) => call.name).join(', ') || t('noText') }))));
    next = page.next ?? undefined;
    more.hidden = !page.next;
    if (!list.childElementCount) list.append(h('li', { class: 'meta', text: t('memoryNone') }));
  };
  const box = h('details', { class: 'memory', 'data-testid': 'memory', ontoggle: () => box.open && !list.childElementCount && load().catch(() => list.replaceChildren(h('li', {}, failed(t('notLoaded'), () => {
    list.replaceChildren();
    load();
  })))) }, h('summary', { text: t('memoryShow') }), list, more);
  return section('page-memory', t('memory'), h('p', { class: 'meta', text: t('memoryHow') }), box);
}
