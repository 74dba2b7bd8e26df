// Files: a list and a preview. Active content is shown as text or not at all.

import { artifactUrl, get, post, query } from '../api.js';
import { button, empty, fileIcon, fill, h } from '../dom.js';
import { bytes, dayAndTime, t } from '../i18n.js';
import { lineStart, nodes } from '../markdown.js';
import { MARKDOWN } from '../message.js';
import { on } from '../state.js';
import { failed, openImage } from './parts.js';

const TEXT = /^text\/|[/+](json|xml|yaml|toml|javascript|x-sh|svg)|^application\/(sql|x-ndjson)/;
const SHOWN = 256 << 10;
const PART = 16_000; // characters of Markdown per request

export function render(root, { args, compact }) {
  return args[0] ? viewer(root, args[0]) : listing(root, compact);
}

function listing(root, compact) {
  const list = h('ul', { class: 'items', 'aria-label': t('artifacts') });
  const foot = h('div');
  const items = new Map();
  let next = null;
  const draw = () => {
    const all = [...items.values()].sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1));
    fill(list, all.map(row));
    fill(foot, next ? button({ class: 'plain-btn', text: t('older'), onclick: () => load(next) }) : all.length ? null : empty(t('artifactsNone')));
  };
  const load = async (before) => {
    try {
      const page = await query('/artifacts', { before, limit: compact ? 20 : 50 });
      for (const item of page.items) items.set(item.artifactRef, item);
      if (before || next === null) next = page.next;
      draw();
    } catch {
      fill(foot, failed(t('notLoaded'), () => load(before)));
    }
  };
  fill(root, list, foot);
  load();
  return on(['artifacts', 'snapshot'], () => load());
}

const row = (file) =>
  h(
    'li',
    { class: 'item' },
    h(
      'a',
      { class: 'item-link file-link', href: `#/artifacts/${encodeURIComponent(file.artifactRef)}` },
      fileIcon(file.type),
      h('span', {}, h('span', { class: 'item-text', dir: 'auto', text: file.filename }), ' ', h('span', { class: 'meta', text: `${bytes(file.size)} · ${dayAndTime(file.createdAt)}` })),
    ),
  );

function viewer(root, ref) {
  const body = h('div', { class: 'viewer', 'aria-busy': 'true' });
  fill(root, h('p', {}, h('a', { href: '#/artifacts', text: t('artifactsAll') })), body);
  const show = async () => {
    try {
      const file = await get(`/artifacts/${encodeURIComponent(ref)}/meta`);
      fill(body, about(file), await contents(file));
    } catch (error) {
      fill(body, error.code === 'unknown_artifact' ? empty(t('artifactUnknown')) : failed(t('notLoaded'), show));
    }
    body.removeAttribute('aria-busy');
  };
  show();
}

const about = (file) =>
  h(
    'header',
    { class: 'viewer-head' },
    h('h2', { dir: 'auto', text: file.filename }),
    h('p', { class: 'meta', text: `${file.mimeType} · ${bytes(file.size)} · ${dayAndTime(file.createdAt)}` }),
    h('a', { class: 'plain-btn link-btn', href: artifactUrl(file.artifactRef), download: file.filename, text: t('downloadFile') }),
  );

/** Elements of a Markdown text, rendered in parts; a part ends before its last block, which may go on. */
async function blocks(text) {
  const made = [];
  for (let at = 0; at < text.length; ) {
    const part = text.slice(at, at + PART);
    const { blocks: found, line } = await post('/markdown', { text: part });
    const isLast = at + PART >= text.length;
    made.push(...nodes(isLast || !line ? found : found.slice(0, -1)));
    at += isLast || !line ? part.length : lineStart(part, line);
  }
  return made;
}

async function contents(file) {
  if (file.type === 'image') {
    const open = button({ class: 'picture-btn', 'aria-label': t('enlarge', { name: file.filename }), onclick: () => openImage(file) });
    open.append(h('img', { src: artifactUrl(file.artifactRef), alt: file.filename }));
    return open;
  }
  if (!TEXT.test(file.mimeType)) return h('p', { class: 'meta', text: t('artifactNoView') });
  const response = await fetch(artifactUrl(file.artifactRef), { headers: { range: `bytes=0-${SHOWN - 1}` } });
  if (file.size && !response.ok) throw new Error(response.statusText); // the body is a problem, not the file
  const text = file.size ? await response.text() : '';
  const formatted = MARKDOWN.test(`${file.mimeType} ${file.filename}`) && text.trim() && (await blocks(text).catch(() => null));
  return [
    formatted ? h('div', { class: 'md file-text file-md', dir: 'auto', 'data-testid': 'formatted' }, formatted) : h('pre', { class: 'file-text', tabindex: '0', role: 'region', 'aria-label': file.filename, dir: 'auto', text }),
    file.size > SHOWN && h('p', { class: 'meta', text: t('artifactCut', { size: bytes(SHOWN) }) }),
  ];
}
