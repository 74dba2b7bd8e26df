// Translations: `t('key', {name: 'Ada'})` fills `{name}`. Each language is one file in words/.

const KEPT = 'coterie.language';
const known = (code) => (/^zh\b/i.test(code) ? 'zh' : 'en');

export const onMac = /mac/i.test(navigator.platform);
/** Names of modifier keys on this platform. */
export const keyNames = (text) => (onMac ? text.replace(/\bCtrl\b/g, '⌘').replace(/\bAlt\b/g, '⌥') : text);

/** All texts of a language. */
export const wordsOf = async (code) => JSON.parse(keyNames(await (await fetch(`/static/words/${code}.json`)).text()));

let language = known(localStorage.getItem(KEPT) ?? navigator.language);
let words = await wordsOf(language);
document.documentElement.lang = language;

export const lang = () => language;
export const otherLang = () => (language === 'zh' ? 'en' : 'zh');
const locale = () => (language === 'zh' ? 'zh-CN' : navigator.language.startsWith('en') ? navigator.language : 'en');

export async function switchLang() {
  words = await wordsOf(otherLang());
  language = otherLang();
  localStorage.setItem(KEPT, language);
  formats.clear();
  document.documentElement.lang = language;
}

export function t(key, values) {
  const text = words[key] ?? key;
  return values ? text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole)) : text;
}

/**
 * Why a request failed, in the page's language. The server's own sentences are English: other languages have one for each
 * code, English only where the server's is for programs.
 */
export function reasonOf({ status, code, detail, more }) {
  if (status === 0) return t('noAnswer');
  const why = more?.problems?.map((one) => [one.place, settingProblem(one)].filter(Boolean).join(t('colon'))).join(t('semicolon'));
  return words[`refused_${code}`] ? t(`refused_${code}`, { detail: why || detail, status }) : detail;
}

/** What a tool does, in one line. Built-in ones are described in English; other languages have a sentence for each. */
export const toolDoes = ({ name, builtIn, description }) => (builtIn && words[`toolDoes_${name}`]) || description.split('\n')[0];

/** What is wrong with a setting. English has the server's sentences, other languages one for each code. */
export function settingProblem({ code, values, parts, message }) {
  if (!words[`config_${code}`]) return message;
  const worded = { ...values };
  if (values.why) worded.why = t('config_quoted', { text: values.why }); // what a program or a server says
  for (const [name, texts] of Object.entries(parts ?? {})) worded[name] = texts.map(settingProblem).join(t('semicolon'));
  let text = t(`config_${code}`, worded);
  if (worded.got) text = t('config_got', { text, got: worded.got });
  return worded.meant ? t('config_meant', { text, meant: worded.meant }) : text;
}

// Formatting of times and sizes

const formats = new Map();

function format(name, options) {
  if (!formats.has(name)) formats.set(name, new Intl.DateTimeFormat(locale(), options));
  return formats.get(name);
}

export const clockTime = (when) => format('clock', { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' }).format(new Date(when));
export const dayAndTime = (when) =>
  format('both', { month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', hourCycle: 'h23' }).format(new Date(when));

export function dayName(when, today = new Date()) {
  const date = new Date(when);
  const text = format('day', { month: 'long', day: 'numeric', weekday: 'short' }).format(date);
  const days = Math.round((midnight(today) - midnight(date)) / 86_400_000);
  if (days === 0) return `${t('today')} · ${text}`;
  if (days === 1) return `${t('yesterday')} · ${text}`;
  return date.getFullYear() === today.getFullYear() ? text : `${date.getFullYear()} ${text}`;
}

const WEEK = ['sun', 'mon', 'tue', 'wed', 'thu', 'fri', 'sat'];
const weekday = (name) => format('weekday', { weekday: 'short' }).format(new Date(2024, 0, 7 + WEEK.indexOf(name)));

/** A recurrence in words: "Monday to Friday at 08:00". Cron fields stay as they are. A time zone is named if it is another one than here. */
export function recurrence(every) {
  const [, rule, zone] = /^(.*?)(?: (UTC|[A-Za-z_]+\/\S+))?$/.exec(every);
  const [, days, time] = /^(monthly \w+|[a-z,-]+) (\d\d:\d\d)$/.exec(rule) ?? [];
  const [, n, unit] = /^(\d+) (minute|hour|day|week)s?$/.exec(rule) ?? [];
  const words = days ? onDays(days, time) : unit ? t('every', { time: new Intl.NumberFormat(locale(), { style: 'unit', unit, unitDisplay: 'long' }).format(Number(n)).replace(/(\d)(?=\p{Script=Han})/u, '$1 ') }) : rule;
  return zone && zone !== Intl.DateTimeFormat().resolvedOptions().timeZone ? `${words} (${zone})` : words;
}

function onDays(days, time) {
  const [, n] = /^monthly (\w+)$/.exec(days) ?? [];
  if (n) return t(n === 'last' ? 'every_last' : 'every_month', { n, time });
  if (/^(daily|weekdays|weekends)$/.test(days)) return t(`every_${days}`, { time });
  return t('every_days', { days: days.split(',').map((part) => part.split('-').map(weekday).join('–')).join(t('comma')), time });
}

export const dayKey = (when) => midnight(new Date(when));
const midnight = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();

/** 00:41, 1:02:03 */
export const elapsed = (ms) => digits(Math.max(0, ms / 1000)).replace(/^(00:|0)/, '');

/** 00:00:41 */
export const digits = (seconds) => [seconds / 3600, (seconds / 60) % 60, seconds % 60].map((n) => String(Math.floor(n)).padStart(2, '0')).join(':');

export const seconds = (ms) => (ms < 950 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** The two largest units of a duration: 4.2 s, 1 m 12 s, 3 h 5 m. */
export function duration(ms) {
  const whole = Math.round(Math.max(0, ms) / 1000);
  if (whole < 10) return t('lasted_s', { n: (Math.max(0, ms) / 1000).toFixed(1) });
  const all = /** @type {[string, number][]} */ ([['d', 86_400], ['h', 3_600], ['m', 60], ['s', 1]]).map(([unit, size], at, sizes) => [unit, Math.floor((at ? whole % sizes[at - 1][1] : whole) / size)]);
  const first = all.findIndex(([, n]) => n);
  return all.slice(first, first + 2).filter(([, n]) => n).map(([unit, n]) => t(`lasted_${unit}`, { n })).join(' ');
}

const numberFormat = (name, options) => {
  if (!formats.has(name)) formats.set(name, new Intl.NumberFormat(locale(), options));
  return formats.get(name);
};

/** 12,345 */
export const count = (n) => numberFormat('count', {}).format(n);
/** 12K */
export const roughly = (n) => numberFormat('rough', { notation: 'compact', maximumFractionDigits: 1 }).format(n);

/** A number with its noun: `n_one_<noun>` and `n_many_<noun>` in words/. */
export const many = (noun, n, shown = count(n)) => t(`n_${n === 1 ? 'one' : 'many'}_${noun}`, { n: shown });

/** $0.11; small amounts with two significant digits. */
export function money(amount, currency) {
  const digits = amount > 0 && amount < 0.01 ? { maximumSignificantDigits: 2 } : {};
  try {
    return numberFormat(`${currency}${Object.keys(digits)}`, { style: 'currency', currency, currencyDisplay: 'narrowSymbol', ...digits }).format(amount);
  } catch {
    return `${count(amount)} ${currency ?? ''}`.trim(); // not a currency code
  }
}

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  if (size < 1_000_000) return `${Math.round(size / 1000)} KB`;
  return `${(size / 1_000_000).toFixed(1)} MB`;
}
