// Messages to the person: open questions first, then all, newest first.

import { post, query } from '../api.js';
import { button, empty, fill, h } from '../dom.js';
import { t } from '../i18n.js';
import { approvalFacts, budgetFacts, draftView, fileList, who } from '../message.js';
import { quickReplies } from '../quick_replies.js';
import { agentPath } from '../router.js';
import { PERSON, SYSTEM, approvalOf, budgetOf, holders, plainText, keep, on, openQuestions, state, threadOf } from '../state.js';
import { failed, section, when } from './parts.js';

const TAIL = 280; // characters shown of a reply in progress; below: how often it is repainted
const SEEN_MS = 100;
const UNSEEN_MS = 500;

export function render(root, { query: asked }) {
  const questions = h('div', { class: 'cards' });
  const waiting = section('inbox-open', '', questions);
  const list = h('ul', { class: 'items', 'aria-labelledby': 'inbox-all' });
  const foot = h('div');
  const saying = section('inbox-live', t('inboxLive'));
  saying.className = 'saying';
  const live = new Map(); // views of replies in progress
  const cards = new Map();
  let ids = new Set();
  const onlyQuestions = asked.get('only') === 'questions';
  let next = null;

  const drawQuestions = () => {
    const open = openQuestions().sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1));
    waiting.firstChild.textContent = t('inboxOpen', { n: open.length });
    for (const message of open) if (!cards.has(message.id)) cards.set(message.id, card(message));
    for (const [id, one] of cards) {
      if (state.questions.has(id) || one.el.contains(document.activeElement)) continue;
      one.stop();
      one.el.remove();
      cards.delete(id);
    }
    questions.querySelector('.empty')?.remove();
    // Do not move cards that stay: the focused one would lose the focus.
    [...cards.values()].sort((a, b) => (a.at < b.at ? 1 : -1)).forEach(({ el }, i) => {
      if (questions.children[i] !== el) questions.insertBefore(el, questions.children[i] ?? null);
    });
    if (!cards.size) fill(questions, empty(t('inboxNoQuestions')));
  };
  const seen = new Set();
  const watch = new IntersectionObserver((all) => {
    for (const { target, isIntersecting } of all) seen[isIntersecting ? 'add' : 'delete'](target.dataset.of);
  });
  const drawLive = () => {
    for (const [id, view] of live) {
      if (state.drafts.has(id)) continue;
      view.leave();
      view.el.remove();
      live.delete(id);
    }
    for (const { id, text, stopped } of state.drafts.values()) {
      if (live.has(id) || !text || stopped) continue;
      live.set(id, draftView({ id }, () => (seen.has(id) ? SEEN_MS : UNSEEN_MS), TAIL));
      live.get(id).el.dataset.of = id;
      saying.append(live.get(id).el);
      watch.observe(live.get(id).el);
    }
    saying.hidden = !live.size;
  };
  const drawAll = () => {
    const all = [...ids].map((id) => state.messages.get(id)).filter((one) => one && one.state !== 'withdrawn');
    all.sort((a, b) => (a.deliveredAt < b.deliveredAt ? 1 : a.deliveredAt > b.deliveredAt ? -1 : 0));
    fill(list, all.map(line));
    readNotices(all.find((one) => threadOf(one) === SYSTEM)?.id);
    fill(foot, next ? button({ class: 'plain-btn', text: t('older'), onclick: () => load(next) }) : all.length ? null : empty(t('inboxNone')));
  };
  let readUpto;
  /** Marks notices as read that are in no conversation. */
  const readNotices = (upto) => {
    if (onlyQuestions || !upto || upto === readUpto || document.hidden || state.messages.get(upto).state !== 'pending') return;
    readUpto = upto;
    post('/read', { thread: SYSTEM, upto }).catch(() => {
      readUpto = null;
    });
  };
  /** Loads a page; the first one, without `before`, replaces all. */
  const load = async (before = null) => {
    const old = before ? [] : [...ids];
    try {
      const page = await query('/messages', { agent: PERSON, before, limit: 50 });
      if (before && before !== next) return;
      for (const id of old) ids.delete(id);
      for (const item of page.items) if (item.to === PERSON && item.deliveredAt) ids.add(keep(item).id);
      next = page.next;
      drawAll();
    } catch {
      fill(foot, failed(t('notLoaded'), () => load(before)));
    }
  };
  const come = () => {
    const last = [...state.threads.values()].map((one) => one.last).filter((one) => one?.to === PERSON && one.deliveredAt);
    ids = new Set([...last.map((one) => one.id), ...ids]);
    drawAll();
  };

  fill(
    root,
    waiting,
    onlyQuestions ? null : saying,
    onlyQuestions ? null : section('inbox-all', t('inboxAll'), list, foot),
  );
  drawQuestions();
  drawLive();
  const reload = () => !onlyQuestions && load();
  reload();
  const held = () => [...ids, ...cards.keys()];
  holders.add(held);
  const stops = [on('snapshot', reload), on(['questions', 'snapshot'], drawQuestions), on(['threads', 'unread', 'snapshot', 'agents'], come), on('drafts:*', drawLive)];
  return () => {
    for (const one of cards.values()) one.stop();
    watch.disconnect();
    for (const one of live.values()) one.leave();
    holders.delete(held);
    stops.forEach((stop) => stop());
  };
}

function card(message) {
  const set = quickReplies(message);
  const el = h(
    'article',
    { class: 'card', data: { messageId: message.id } },
    h('p', { class: 'item-head' }, h('a', { href: agentPath(message.from), text: who(message.from), dir: 'auto' }), ' ', when(message.deliveredAt)),
    h('p', { class: 'item-text', dir: 'auto', text: plainText(message) }),
    budgetOf(message) && budgetFacts(message),
    approvalOf(message) && approvalFacts(message),
    fileList(message),
    set?.el,
  );
  const stop = on([`message:${message.id}`, 'questions'], () => set?.update());
  return {
    el,
    at: message.createdAt,
    stop() {
      stop();
      set?.leave();
    },
  };
}

function line(message) {
  const unread = message.state === 'pending';
  return h(
    'li',
    { class: unread ? 'item unread' : 'item' },
    h(
      'a',
      { class: 'item-link', href: agentPath(threadOf(message), message.id) },
      h('span', { class: 'item-head' }, h('span', { dir: 'auto', text: who(message.from) }), unread && h('span', { class: 'tag', text: t('new') }), when(message.deliveredAt)),
      h('span', { class: 'item-text clamp', dir: 'auto', text: plainText(message) || t('noText') }),
    ),
  );
}
