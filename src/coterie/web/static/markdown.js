// Renders the server's Markdown nodes as elements. An unknown node shows its text.

import { post } from './api.js';
import { button, h } from './dom.js';
import { t } from './i18n.js';
import { copyText } from './notices.js';

const PLAIN = { em: 'em', strong: 'strong', s: 's', p: 'p', quote: 'blockquote', ul: 'ul', hr: 'hr', br: 'br' };
const COLOURS = [[/^k/, 'k'], [/^s/, 's'], [/^c/, 'c'], [/^m/, 'n'], [/^n[fcbd]/, 'f'], [/^o/, 'o']];

let above = 1; // level of the page's own heading; a message's headings follow without a gap

/** Elements of the nodes. `level`: of the last heading before them. */
export function nodes(list, level = 1) {
  above = level;
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
    const colour = COLOURS.find(([pattern]) => /** @type {RegExp} */ (pattern).test(kind))?.[1];
    return colour ? h('span', { class: `tok-${colour}` }, text) : document.createTextNode(text);
  });
  const text = (tokens ?? []).map(([, piece]) => piece).join('');
  const copy = button({ class: 'md-copy', onclick: () => copyText(text) }, t('copy'));
  return h('div', { class: 'md-code' }, h('div', { class: 'md-code-head' }, h('span', {}, lang ?? ''), copy),
    h('pre', { tabindex: '0', 'aria-label': lang || t('codeBlock'), role: 'region' }, h('code', {}, runs)));
}

function table({ align = [], head = [], rows = [] }) {
  const cell = (tag) => (inside, at) => h(tag, { class: align[at] ? `md-${align[at]}` : null, scope: tag === 'th' ? 'col' : null }, each(inside));
  return h('div', { class: 'md-table', tabindex: '0', role: 'region', 'aria-label': plain(head.flat()) || t('table') },
    h('table', {}, h('thead', {}, h('tr', {}, head.map(cell('th')))), h('tbody', {}, rows.map((row) => h('tr', {}, row.map(cell('td')))))));
}

// A text that grows: only its last block is rendered again

const RENDER_MS = 150;
const CHARACTERS_PER_MS = 20; // a long block is rendered less often
const INTO = 'P, LI, UL, OL, BLOCKQUOTE, PRE, CODE, H2, H3, H4, H5, H6';
const LINE = /\r\n?|\n/g;

/** `{el, push(text), end()}`: push gets the whole text so far. What the server has not rendered yet is shown as text. */
export function growing() {
  const rest = document.createTextNode('');
  const caret = h('span', { class: 'caret', 'aria-hidden': 'true' });
  const el = h('div', { class: 'md' }, h('p', { class: 'as-typed' }, rest, caret));
  let tail = [el.firstChild]; // elements of the last block
  let text = '';
  let level = 1;
  let settled = 0; // characters of the blocks before the last
  let shown = 0; // characters that are rendered
  let alone = false; // the server does not answer
  let timer = null;
  let busy = false;
  let over = false;

  function push(next) {
    if (!next.startsWith(text)) {
      tail = [h('p', { class: 'as-typed' })];
      el.replaceChildren(...tail);
      settled = shown = 0;
      level = 1;
    }
    text = next;
    put();
    soon();
  }

  /** Puts what is not rendered to the end of the last block: only its first line, unless the server does not answer. */
  function put() {
    let into = tail.at(-1);
    while (into.lastElementChild?.matches(INTO) || into.matches('.md-code')) into = into.lastElementChild;
    const fits = into.matches(INTO);
    const more = text.slice(shown);
    const line = alone ? more : fits ? more.split('\n', 1)[0] : '';
    if (rest.data !== line) rest.data = line;
    if (rest.parentNode !== into || rest.nextSibling !== caret) (fits ? into : el).append(rest, caret);
  }

  function soon() {
    if (busy || over || shown === text.length) return;
    timer ??= setTimeout(render, Math.max(RENDER_MS, (text.length - settled) / CHARACTERS_PER_MS));
  }

  async function render() {
    timer = null;
    busy = true;
    const upto = text.length;
    const part = text.slice(settled);
    const answer = await post('/markdown', { text: part }).catch(() => null);
    busy = false;
    if (over || text.slice(settled, upto) !== part) return soon();
    alone = !answer;
    if (answer?.blocks.length) {
      const last = answer.blocks.pop();
      const whole = nodes(answer.blocks, level);
      if (whole.length) level = above;
      tail.forEach((one) => one.remove());
      tail = nodes([last], level).map((one) => (one.matches ? one : h('p', { class: 'as-typed' }, one)));
      el.append(...whole, ...tail);
      settled += lineStart(part, answer.line);
      shown = upto;
    }
    put();
    soon();
  }

  return {
    el,
    push,
    end() {
      over = true;
      clearTimeout(timer);
      alone = true; // the text may never be rendered
      put();
      caret.remove();
    },
  };
}

/** Where the line with this number begins. */
export function lineStart(text, number) {
  if (!number) return 0;
  LINE.lastIndex = 0;
  for (let n = 0; n < number; n += 1) if (!LINE.exec(text)) return text.length;
  return LINE.lastIndex;
}
