// Attachments of the message being written: one chip per file, with upload progress and how the recipient gets it.

import { button, fileIcon, fill, h, iconButton, toComposer } from './dom.js';
import { upload } from './api.js';
import { bytes, reasonOf, t } from './i18n.js';
import { on, state } from './state.js';

const NEEDS = { image: 'vision', audio: 'audio', file: 'file' };

const percent = (chip) => Math.round(chip.share * 100);

/** Chips that wait for the composer of an agent: moved from another one, or left in it while they were uploaded. */
const handed = new Map();

/**
 * Calls `changed` whenever a chip changes, and `moveTo(agent)` to move the draft to another agent.
 * `endedLater(chip, isLast)`: the upload of a file ended after the tray was left. True if the draft with all files was sent.
 */
export function mountTray(root, agent, changed, moveTo, endedLater) {
  let chips = [...new Set(['', agent])].flatMap((each) => handed.get(each) ?? []); // '': before the agents were loaded
  handed.delete('');
  handed.delete(agent);

  function add(files) {
    for (const file of files) {
      const chip = { file, name: file.name || 'file', size: file.size, kind: file.type.split('/')[0], share: 0, status: 'uploading', ended };
      chips.push(chip);
      begin(chip);
    }
    paint();
  }

  function begin(chip) {
    Object.assign(chip, { status: 'uploading', share: 0 });
    const { done, cancel } = upload(chip.file, (share) => {
      chip.share = share;
      if (chip.bar) chip.bar.style.inlineSize = `${percent(chip)}%`;
      if (chip.word) chip.word.textContent = t('uploading', { n: percent(chip) });
    });
    chip.cancel = cancel;
    done.then(
      (artifact) => Object.assign(chip, { status: 'ready', artifact, size: artifact.size, kind: artifact.type }),
      (problem) => Object.assign(chip, { status: problem.status === 413 ? 'big' : 'failed', why: reasonOf(problem) }),
    ).then(() => chip.ended(chip));
  }

  function ended(chip) {
    if (chip.status !== 'ready' && chips.includes(chip)) tray.waits = false; // never sent without the file
    paint();
  }

  function drop(chip) {
    if (chip.status === 'uploading') chip.cancel?.();
    chips = chips.filter((one) => one !== chip);
    paint();
    toComposer();
  }

  function paint() {
    if (!chips.length) tray.waits = false;
    fill(root, chips.length > 0 && h('ul', { class: 'file-chips', 'aria-label': t('attachments') }, chips.map(view)));
    changed();
  }

  function view(chip) {
    chip.bar = h('span', { class: 'chip-bar' });
    chip.bar.style.inlineSize = `${percent(chip)}%`;
    chip.word = h('span', { class: 'meta num' }, { uploading: t('uploading', { n: percent(chip) }), ready: bytes(chip.size), big: t('uploadTooBig'), failed: t('uploadFailed') }[chip.status]);
    return h('li', { class: `file-chip is-${chip.status}`, 'data-testid': 'attachment', title: chip.why ?? null }, fileIcon(chip.kind),
      h('span', { class: 'chip-words' }, h('span', { class: 'chip-line' }, h('span', { class: 'chip-name', dir: 'auto' }, chip.name), chip.word), note(chip)),
      chip.status === 'failed' ? button({ class: 'text-btn', 'aria-label': t('retryFile', { name: chip.name }), onclick: () => {
        begin(chip);
        paint();
      } }, t('retry')) : null,
      iconButton('close', t('removeFile', { name: chip.name }), { class: 'chip-close', onclick: () => drop(chip) }), chip.status === 'uploading' && chip.bar);
  }

  /** How the recipient gets the file, by its model's input capabilities. */
  function note(chip) {
    if (chip.status !== 'ready' && chip.status !== 'uploading') return null;
    const kind = NEEDS[chip.kind] ? chip.kind : 'file';
    const can = (one) => one.capabilities?.input?.includes(NEEDS[kind]);
    const one = state.agents.get(agent);
    if (!one || can(one)) return h('span', { class: 'chip-note', 'data-testid': 'how' }, `→ ${t('asOriginal')}`);
    const able = [...state.agents.values()].find((other) => other.id !== agent && other.kind !== 'person' && other.state !== 'terminated' && can(other));
    return h('span', { class: 'chip-note is-adapted', 'data-testid': 'how' }, '→ ', t('asText', { name: one.name, kind: t(`kind_${kind}`) }),
      able ? button({ class: 'text-btn', 'data-testid': 'send-instead', onclick: () => moveTo(able.id) }, `→ ${t('sendInstead', { name: able.name })}`) : null);
  }

  const end = on([`agent:${agent}`, 'agents', 'snapshot'], () => chips.length && paint());
  const tray = {
    waits: false,
    add,
    restore(files) {
      const known = chips.map((one) => one.artifact?.artifactRef);
      for (const one of files) {
        if (typeof one?.artifactRef === 'string' && !known.includes(one.artifactRef)) chips.push({ name: one.filename ?? '', size: one.size ?? 0, kind: one.type, status: 'ready', share: 1, artifact: one });
      }
      paint();
    },
    drop: (file) => chips.filter((one) => one.file === file).forEach(drop),
    any: () => chips.some((one) => one.status === 'ready' || one.status === 'uploading'),
    isWhole: () => chips.every((one) => one.status === 'ready' || one.status === 'uploading'),
    busy: () => chips.some((one) => one.status === 'uploading'),
    ready: () => chips.filter((one) => one.status === 'ready').map((one) => one.artifact),
    /** Moves all chips to another agent's composer, also those still uploading. */
    hand(other) {
      handed.set(other, [...(handed.get(other) ?? []), ...chips]); // others may still be uploading there
      chips = [];
    },
    clear() {
      chips = chips.filter((one) => one.status !== 'ready');
      paint();
    },
    /** Uploads go on. Returns true if chips wait for the next tray of the agent; otherwise the draft has all of them. */
    leave() {
      end();
      if (!chips.some((one) => one.file && one.status !== 'ready')) return false;
      handed.set(agent, chips);
      for (const chip of chips) chip.ended = () => endedLater(chip, !chips.some((one) => one.status === 'uploading')) && handed.delete(agent);
      return true;
    },
  };
  for (const chip of chips) chip.ended = ended;
  if (chips.length) queueMicrotask(paint);
  return tray;
}
