// Messages that could not be delivered: send again or delete.

import { del, post, query } from '../api.js';
import { button, empty, fill, h } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';
import { who } from '../message.js';
import { toast } from '../notices.js';
import { on, plainText, watchers } from '../state.js';
import { busy, confirm, failed } from './parts.js';

const SOON_MS = 200; // one request for many messages

export function render(root) {
  const list = h('ul', { class: 'items', 'aria-label': t('dead') });
  const foot = h('div');
  const items = new Map();
  let next = null;
  let gone = false;

  const draw = () => {
    fill(list, [...items.values()].map(row));
    fill(foot, next ? button({ class: 'plain-btn', text: t('older'), onclick: () => load(next) }) : items.size ? null : empty(t('deadNone')));
  };
  const load = async (before) => {
    try {
      const page = await query('/dead-letters', { before, limit: 50 });
      if (gone) return;
      if (!before) items.clear();
      for (const one of page.items) items.set(one.id, one);
      next = page.next;
      draw();
    } catch {
      if (!gone) fill(foot, failed(t('notLoaded'), () => load(before)));
    }
  };
  const path = (one) => `/dead-letters/${encodeURIComponent(one.id)}`;
  const row = (one) => {
    const text = plainText(one) || t('noText');
    const again = button({ class: 'text-btn', text: t('sendAgain'), 'aria-label': `${t('sendAgain')}: ${text.slice(0, 60)}`, 'data-testid': 'dead-resend', onclick: () => busy(again, async () => {
      await post(`${path(one)}/resend`);
      toast({ text: t('deadSent') });
      await load();
    }) });
    const remove = button({ class: 'text-btn danger', text: t('remove'), 'aria-label': `${t('remove')}: ${text.slice(0, 60)}`, 'data-testid': 'dead-delete', onclick: async () => {
      if (await confirm(t('deadSure'), t('remove'), text.slice(0, 200))) await busy(remove, () => del(path(one)).then(() => load()));
    } });
    const why = t(`dead_${one.reason}`);
    return h('li', { class: 'item', data: { messageId: one.id } }, h('p', { class: 'item-head' }, h('span', { dir: 'auto', text: `${who(one.from)} → ${who(one.to)}` }), h('time', { class: 'meta', datetime: one.createdAt, text: dayAndTime(one.createdAt) })),
      h('p', { class: 'item-text', dir: 'auto', text }),
      h('p', { class: 'item-foot' }, h('span', { class: 'tag dead', text: why.startsWith('dead_') ? one.reason ?? '' : why }), h('span', { class: 'item-acts' }, again, remove)));
  };
  fill(root, h('p', { class: 'meta screen-note', text: t('deadHow') }), list, foot);
  load();
  const end = on('snapshot', () => load());
  let soon = null;
  const watch = (kind, data) => {
    if (!kind.startsWith('message.') || !(data.message?.state === 'dead' || items.has(data.id))) return;
    soon ??= setTimeout(() => {
      soon = null;
      load();
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
