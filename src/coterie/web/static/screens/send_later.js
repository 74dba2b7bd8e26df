// The dialog that asks when a message is to be delivered: presets, a date, a recurrence. Also edits a scheduled message.

import { button, fill, h } from '../dom.js';
import { clockTime, dayAndTime, reasonOf, t } from '../i18n.js';
import { now } from '../state.js';
import { choice, field, openDialog, styled } from './parts.js';

await styled('/static/screens/menu.css');

const DAYS = ['sun', 'mon', 'tue', 'wed', 'thu', 'fri', 'sat'];
export const timeZone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;

const two = (n) => String(n).padStart(2, '0');
/** A date as the value of an input of the type datetime-local. */
const local = (date) => `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}T${two(date.getHours())}:${two(date.getMinutes())}`;

function at(days, hours) {
  const date = new Date(now());
  date.setDate(date.getDate() + days);
  date.setHours(hours, 0, 0, 0);
  return date;
}

/** Common times after now. */
export function presets() {
  const today = new Date(now());
  const toMonday = ((8 - today.getDay()) % 7) || 7;
  return [
    ['whenHour', new Date(Math.ceil((now() + 3_600_000) / 60_000) * 60_000)],
    today.getHours() < 18 && ['whenEvening', at(0, 18)],
    ['whenTomorrow', at(1, 9)],
    toMonday !== 1 && ['whenMonday', at(toMonday, 9)],
  ].filter(Boolean);
}

/** From the 29th on, the last day of a month stands for the last day of every month. */
function monthly(date, clock) {
  const next = new Date(date.getFullYear(), date.getMonth(), date.getDate() + 1);
  return date.getDate() > 28 && next.getDate() === 1 ? [`monthly last ${clock}`, t('repeatMonthlyLast')] : [`monthly ${date.getDate()} ${clock}`, t('repeatMonthly')];
}

/** Recurrences that fit a date, as the server writes them. */
function recurrences(date) {
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return [['', t('repeatNever')], [`daily ${clock}`, t('repeatDaily')], [`weekdays ${clock}`, t('repeatWeekdays')], [`${DAYS[date.getDay()]} ${clock}`, t('repeatWeekly')], monthly(date, clock), ['custom', t('repeatCustom')]];
}

/**
 * Resolves to `{at, every, timeZone, text}`, or null. `text`: what is sent; with `edits` it can be changed.
 * `from`: the present time and recurrence of a scheduled message; without `edits` a single one stays single, a recurring
 * one recurring. `at` of an unchanged date is the present time, to the millisecond. `save(plan)` may throw to keep the dialog open.
 */
export function askWhen({ title, text, edits = false, from = { at: null, every: null }, save = null }) {
  return new Promise((resolve) => {
    let said = null;
    // A time was counted from now, so it may be some milliseconds before the minute that was chosen.
    const start = from.at ? new Date(Date.parse(from.at) + 1000) : at(1, 9);
    const shown = local(start);
    const input = h('input', { type: 'datetime-local', required: true, min: local(new Date(now())), value: shown, 'data-testid': 'when-at' });
    // A message that has only files needs no text.
    const words = edits && h('textarea', { rows: '3', dir: 'auto', required: Boolean(text), 'data-testid': 'when-text' });
    if (words) words.value = text;
    const custom = h('input', { type: 'text', dir: 'ltr', spellcheck: 'false', value: from.every ?? '', placeholder: 'mon,thu 18:30', 'data-testid': 'when-custom' });
    const customField = field(t('repeatCustom'), custom, t('repeatHint'));
    const problem = h('p', { class: 'inline-error', role: 'alert', hidden: true });
    const summary = h('p', { class: 'meta', role: 'status' });
    const repeatBox = h('div');
    let every = from.every ? 'custom' : '';

    const date = () => new Date(input.value);
    const drawRepeat = () => {
      const known = recurrences(date()).filter(([value]) => edits || !from.at || Boolean(value) === Boolean(from.every));
      if (from.every && known.some(([value]) => value === from.every) && every === 'custom') every = from.every;
      const kinds = known.map(([value]) => value);
      // The same kind at the new time.
      if (every && every !== 'custom' && !kinds.includes(every)) every = kinds.find((value) => value.split(' ')[0] === every.split(' ')[0] || (DAYS.includes(every.split(' ')[0]) && DAYS.includes(value.split(' ')[0]))) ?? '';
      const select = choice(known, every, (value) => {
        every = value;
        draw();
      });
      select.dataset.testid = 'when-repeat';
      fill(repeatBox, known.length > 1 && field(t('repeat'), select));
      draw();
    };
    const draw = () => {
      customField.hidden = every !== 'custom';
      custom.required = every === 'custom';
      summary.textContent = Number.isNaN(date().getTime()) ? '' : every ? t('whenRepeats', { time: clockTime(date()) }) : t('whenAt', { time: dayAndTime(date()) });
    };
    const finish = async (when) => {
      problem.hidden = true;
      const plan = { at: when.toISOString(), every: (every === 'custom' ? custom.value.trim() : every) || null, timeZone: timeZone(), text: words ? words.value : text };
      if (!plan.every && when.getTime() <= now()) return refuse(t('whenPast'));
      // A recurrence has its own times: the date is only its start.
      if (when.getTime() <= now()) plan.at = null;
      try {
        await save?.(plan);
      } catch (error) {
        return refuse(reasonOf(error) ?? String(error));
      }
      said = plan;
      close();
    };
    const refuse = (why) => {
      problem.textContent = why;
      problem.hidden = false;
    };
    input.addEventListener('input', () => input.value && drawRepeat());
    const form = h('form', { class: 'when', onsubmit: (event) => {
      event.preventDefault();
      finish(from.at && input.value === shown ? new Date(from.at) : date());
    } },
    words && field(t('whenText'), words),
    !from.at && h('div', { class: 'presets', role: 'group', 'aria-label': t('whenPresets') }, presets().map(([name, when]) =>
      button({ class: 'plain-btn preset', 'data-testid': name, onclick: () => {
        every = '';
        finish(when);
      } }, h('span', {}, t(name)), h('span', { class: 'meta' }, dayAndTime(when))))),
    field(t('whenDate'), input), repeatBox, customField, summary, problem,
    h('div', { class: 'modal-foot' }, button({ class: 'plain-btn', text: t('cancel'), onclick: () => close() }), h('button', { type: 'submit', class: 'primary', 'data-testid': 'when-save', text: t(from.at ? 'save' : 'whenSchedule') })));
    drawRepeat();
    const { close, el } = openDialog(title, form, { closed: () => resolve(said) });
    (words || el.querySelector('.preset') || input).focus();
  });
}
