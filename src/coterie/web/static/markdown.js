// Renders the server's Markdown nodes as elements. An unknown node shows its text.

import { button, h } from './dom.js';
import { t } from './i18n.js';
import { copyText } from './notices.js';

const PLAIN = { em: 'em', strong: 'strong', s: 's', p: 'p', quote: 'blockquote', ul: 'ul', hr: 'hr', br: 'br' };
const COLOURS = [[/^k/, 'k'], [/^s/, 's'], [/^c/, 'c'], [/^m/, 'n'], [/^n[fcbd]/, 'f'], [/^o/, 'o']];

let above = 1; // level of the page's own heading; a message's headings follow without a gap

export function nodes(list) {
  above = 1;
  return each(list);
}

const each = (list) => (Array.isArray(list) ? list : []).map(node);

function node(one) {
  if (typeof one === 'string') return document.createTextNode(one);
  const inside = () => each(one.c);
  switch (one.t) {
    case 'h': return heading(one);
    case 'ol': return h('ol', { start: one.start === 1 ? null : String(one.start) }, inside());
    case 'li': return item(one);
    case 'code': return code(one);
    case 'table': return table(one);
    case 'tt': return h('code', { class: 'md-tt' }, one.s ?? '');
    case 'a': return link(one);
  }
  return h(PLAIN[one.t] ?? 'span', {}, inside());
}

function heading(one) {
  above = Math.min(6, above + 1, one.n + 1);
  return h(`h${above}`, { class: 'md-h' }, each(one.c));
}

function item(one) {
  if (one.task === undefined) return h('li', {}, each(one.c));
  const box = h('span', { class: `md-box ${one.task ? 'md-done' : ''}`, role: 'img', 'aria-label': t(one.task ? 'task_done' : 'task_open') }, one.task ? '✓' : '');
  return h('li', { class: 'md-task' }, box, each(one.c));
}

function link(one) {
  const href = /^(https?:|mailto:)/i.test(one.href) ? one.href : null;
  const words = each(one.c);
  if (!href) return h('span', {}, words);
  const mark = one.image && h('span', { class: 'md-host' }, t('image'));
  const text = plain(one.c);
  const host = one.host && !text.includes(one.host) && h('span', { class: 'md-host' }, one.host);
  return h('a', { href, target: '_blank', rel: 'noopener noreferrer nofollow' }, words, mark, host);
}

const plain = (list) => (list ?? []).map((one) => (typeof one === 'string' ? one : one.s ?? plain(one.c))).join('');

function code({ lang, tokens }) {
  const runs = (tokens ?? []).map(([kind, text]) => {
    const colour = COLOURS.find(([pattern]) => pattern.test(kind))?.[1];
    return colour ? h('span', { class: `tok-${colour}` }, text) : document.createTextNode(text);
  });
  const text = (tokens ?? []).map(([, piece]) => piece).join('');
  const copy = button({ class: 'md-copy', onclick: () => copyText(text) }, t('copy'));
  return h('div', { class: 'md-code' }, h('div', { class: 'md-code-head' }, h('span', {}, lang ?? ''), copy),
    h('pre', { tabindex: '0', 'aria-label': lang || 'code', role: 'region' }, h('code', {}, runs)));
}

function table({ align = [], head = [], rows = [] }) {
  const cell = (tag) => (inside, at) => h(tag, { class: align[at] ? `md-${align[at]}` : null, scope: tag === 'th' ? 'col' : null }, each(inside));
  return h('div', { class: 'md-table', tabindex: '0', role: 'region', 'aria-label': plain(head.flat()) || 'table' },
    h('table', {}, h('thead', {}, h('tr', {}, head.map(cell('th')))), h('tbody', {}, rows.map((row) => h('tr', {}, row.map(cell('td')))))));
}
