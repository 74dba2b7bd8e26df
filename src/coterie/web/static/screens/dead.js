// Messages that could not be delivered: send again or delete.

import { del, post, query } from '../api.js';
import { button, empty, fill, h, sync } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';
import { who } from '../message.js';
import { toast } from '../notices.js';
import { on, plainText, watchers } from '../state.js';
import { busy, confirm, failed } from './parts.js';

const SOON_MS = 200; // many messages are drawn once

export function render(root) {
  const list = h('ul', { class: 'items', 'aria-label': t('dead') });
  const foot = h('div');
  const items = new Map();
  const rows = new Map(); // kept: a button of one may be at work
  let news = null; // during a request: the messages of events, which are newer than its answer
  let next = null;
  let gone = false;

  const draw = () => {
    for (const id of rows.keys()) if (!items.has(id)) rows.delete(id);
    for (const [id, one] of items) if (!rows.has(id)) rows.set(id, row(one));
    sync(list, [...items.keys()].map((id) => rows.get(id)));
    // The page after the last message that is left: the one that `next` names may be deleted.
    sync(foot, next ? button({ class: 'plain-btn', text: t('older'), onclick: () => load([...items.keys()].at(-1)) }) : items.size ? null : empty(t('deadNone')));
  };
  const load = async (before) => {
    news = new Map();
    try {
      const page = await query('/dead-letters', { before, limit: 50 });
      if (gone) return;
      if (!before) items.clear();
      for (const one of page.items) items.set(one.id, one);
      next = page.next;
      news?.forEach((one, id) => take(id, one));
      news = null;
      draw();
    } catch {
      news = null;
      if (!gone) fill(foot, failed(t('notLoaded'), () => load(before)));
    }
  };
  /** Adds, replaces or removes a message. One after the last loaded page stays out. */
  const take = (id, one) => {
    if (one?.state !== 'dead') return items.delete(id);
    if (!items.has(id) && next && one.createdAt < [...items.values()].at(-1)?.createdAt) return;
    const all = [...(items.has(id) ? [] : [[id, one]]), ...items].sort(([, a], [, b]) => (a.createdAt < b.createdAt ? 1 : a.createdAt > b.createdAt ? -1 : 0));
    items.clear();
    for (const [key, value] of all) items.set(key, value);
  };
  const leave = (one) => {
    take(one.id);
    draw();
  };
  const path = (one) => `/dead-letters/${encodeURIComponent(one.id)}`;
  const row = (one) => {
    const text = plainText(one) || t('noText');
    const again = button({ class: 'text-btn', text: t('sendAgain'), 'aria-label': `${t('sendAgain')}: ${text.slice(0, 60)}`, 'data-testid': 'dead-resend', onclick: () => busy(again, async () => {
      await post(`${path(one)}/resend`);
      toast({ text: t('deadSent') });
      leave(one);
    }) });
    const remove = button({ class: 'text-btn danger', text: t('remove'), 'aria-label': `${t('remove')}: ${text.slice(0, 60)}`, 'data-testid': 'dead-delete', onclick: async () => {
      if (await confirm(t('deadSure'), t('remove'), text.slice(0, 200))) await busy(remove, () => del(path(one)).then(() => leave(one)));
    } });
    const why = t(`dead_${one.reason}`);
    return h('li', { class: 'item', data: { messageId: one.id, key: one.id } }, h('p', { class: 'item-head' }, h('span', { dir: 'auto', text: `${who(one.from)} → ${who(one.to)}` }), h('time', { class: 'meta', datetime: one.createdAt, text: dayAndTime(one.createdAt) })),
      h('p', { class: 'item-text', dir: 'auto', text }),
      h('p', { class: 'item-foot' }, h('span', { class: 'tag dead', text: why.startsWith('dead_') ? one.reason ?? '' : why }), h('span', { class: 'item-acts' }, again, remove)));
  };
  fill(root, h('p', { class: 'meta screen-note', text: t('deadHow') }), list, foot);
  load();
  const end = on('snapshot', () => load());
  let soon = null;
  const watch = (kind, data) => {
    if (!kind.startsWith('message.')) return;
    news?.set(data.id, data.message);
    take(data.id, data.message);
    soon ??= setTimeout(() => {
      soon = null;
      draw();
    }, SOON_MS);
  };
  watchers.add(watch);
  return () => {
    gone = true;
    clearTimeout(soon);
    watchers.delete(watch);
    end();
  };
}
