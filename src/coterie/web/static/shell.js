// The frame around every screen: banner, agent list, screen with composer, inspector. Built once.

import { post } from './api.js';
import { button, fill, h, icon, iconButton, setAttr, setText } from './dom.js';
import { elapsed, keyNames, lang, otherLang, settingProblem, switchLang, t, wordsOf } from './i18n.js';
import { oops } from './notices.js';
import { show } from './router.js';
import { everySecond, isScripted, now, on, state, unreadTotal, upTo99 } from './state.js';
import { doing, dot, mountAgents, stop, stopping } from './agents_list.js';

const THEME = 'coterie.theme';
const THEMES = ['auto', 'light', 'dark'];
const parts = {};
let clean = [];

export const dock = () => parts.dock;
export const region = (name) => parts[name];

// Theme

const theme = () => THEMES.find((name) => name === localStorage.getItem(THEME)) ?? 'auto';

export function applyTheme() {
  if (theme() === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme();
}

export function nextTheme() {
  localStorage.setItem(THEME, THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  applyTheme();
  parts.footer?.replaceWith((parts.footer = footer()));
  parts.footer.querySelector('[data-testid="theme"]').focus();
}

// On-screen keyboard

/** Keeps the app in the part of the window that the keyboard leaves visible: Safari does not make the page smaller. */
export function followKeyboard() {
  const view = window.visualViewport;
  view?.addEventListener('resize', () => {
    if (Math.abs(view.scale - 1) > 0.01) return; // the person has zoomed in
    document.documentElement.style.setProperty('--visible-height', `${view.height}px`);
    scrollTo(0, 0);
  });
}

// Language

export async function switchLanguage() {
  await switchLang();
  buildShell();
  show();
  document.querySelector('[data-testid="language"]')?.focus();
  document.dispatchEvent(new Event('languagechange'));
}

// Building

export function buildShell() {
  clean.splice(0).forEach((end) => end());
  const early = /** @type {HTMLTextAreaElement} */ (document.getElementById('early'));
  const kept = early && { text: early.value, focused: document.activeElement === early };
  const app = document.getElementById('app');
  parts.top = h('header', { class: 'top', 'data-testid': 'header' });
  parts.list = h('div', { class: 'agents' });
  parts.footer = footer();
  parts.side = h('nav', { class: 'side', id: 'side', 'aria-label': t('regionAgents') }, h('div', { class: 'brand', 'data-testid': 'brand' }, h('img', { src: '/static/icon.svg', alt: '', width: 24, height: 24 }), 'Coterie'), parts.list, parts.footer);
  parts.screen = h('div', { class: 'screen' });
  parts.toasts = h('div', { class: 'toasts', role: 'region', 'aria-label': t('notices'), 'data-testid': 'toasts' });
  parts.dock = h('div', { class: 'dock' });
  parts.banner = h('div', { class: 'banners' });
  parts.away = h('div', { class: 'banners' });
  parts.main = h('main', { class: 'main', id: 'main', tabindex: '-1' }, parts.banner, parts.away, parts.screen, parts.toasts, parts.dock);
  parts.inspector = h('aside', { class: 'inspector', id: 'inspector', 'aria-label': t('regionInspector'), 'data-testid': 'inspector' });
  parts.veil = h('div', { class: 'veil', onclick: () => closeSlides() });
  fill(app, skip(), parts.top, parts.side, parts.main, parts.inspector, parts.veil);
  if (kept) parts.early = kept;
  clean = [mountHeader(parts.top), mountAgents(parts.list), on(['unread', 'questions', 'snapshot'], documentTitle), on(['connection', 'snapshot', 'agents', 'society'], banners)];
  closeSlides(false);
  banners();
}

/** Returns text that was typed before the page was ready, once. */
export function takeEarly() {
  const early = parts.early;
  parts.early = null;
  return early;
}

const skip = () =>
  h('a', { class: 'skip', href: '#main', text: t('skip'), onclick: (event) => {
    event.preventDefault();
    (document.getElementById('composer') ?? parts.main).focus();
  } });

function footer() {
  return h('div', { class: 'side-foot' },
    iconButton('theme', t(`theme_${theme()}`), { 'data-testid': 'theme', onclick: nextTheme }),
    button({ class: 'text-btn', 'data-testid': 'language', 'aria-label': t('languageLabel'), lang: otherLang(), onclick: switchLanguage }, t('language')),
    iconButton('help', t('shortcuts'), { 'data-testid': 'shortcuts', onclick: () => import('./keyboard.js').then((keys) => keys.showSheet()) }),
    h('a', { class: 'icon-btn', href: '#/setup', 'aria-label': t('setup'), title: t('setup'), 'data-testid': 'setup-link' }, icon('gear')));
}

/** Prepares and returns the element to show a screen in. */
export function frame(at, what) {
  closeSlides(false);
  parts.at = at;
  parts.screenTitle = what.title();
  document.getElementById('app').classList.toggle('is-wide', at.name !== 'a' && at.name !== '');
  const fresh = h('div', { class: `screen screen-${at.name || 'a'}`, 'data-testid': `screen-${at.name || 'a'}` });
  parts.screen.replaceWith(fresh);
  parts.screen = fresh;
  fill(parts.dock);
  parts.dock.hidden = true;
  document.dispatchEvent(new Event('screen'));
  return fresh;
}

const shownAt = () => parts.at ?? { name: '', args: [] };

function documentTitle() {
  const n = unreadTotal();
  document.title = (n ? `(${upTo99(n)}) ` : '') + [parts.heading, 'Coterie'].filter(Boolean).join(' · ');
}

function banners() {
  const told = [];
  if (state.connection === 'stopped') {
    const n = state.shutdown?.delayedFlushed ?? 0;
    told.push(h('p', { class: 'banner banner-warn', 'data-testid': 'banner-stopped' }, n ? t('stoppedEarly', { n }) : t('stopped')));
  }
  if (state.allPaused) {
    told.push(h('p', { class: 'banner banner-warn', 'data-testid': 'banner-paused' }, h('span', { class: 'banner-text' }, t('allPaused')),
      button({ class: 'text-btn', onclick: () => post('/resume').catch(oops) }, t('resumeAll'))));
  }
  const { applied, problems } = state.configuration;
  if (problems.length) {
    const what = t(applied ? 'configProblems' : 'configRefused');
    const [first] = problems;
    told.push(h('p', { class: 'banner banner-warn banner-settings', 'data-testid': 'banner-configuration' },
      h('span', { class: 'banner-text' }, what, ' ', h('bdi', {}, `${first.place}${t('colon')}${settingProblem(first).slice(0, 240)}`), problems.length > 1 && ` ${t('moreProblems', { n: problems.length - 1 })}`),
      h('a', { href: '#/setup' }, t('fixIt'))));
  }
  const tour = [...state.agents.values()].some(isScripted);
  if (tour) {
    told.push(h('p', { class: 'banner banner-tour', 'data-testid': 'banner-tour' },
      h('span', { class: 'tag' }, t('tour')), h('span', { class: 'banner-text' }, t('noModel')), h('a', { href: '#/start' }, t('setUpModel'))));
  }
  fill(parts.banner, told);
}

// Slide-overs in small windows

function toggleSlide(name) {
  const open = document.body.dataset.slide === name;
  closeSlides(false);
  if (open) return;
  document.body.dataset.slide = name;
  reachable();
  parts[name].querySelector('input, button, a, [tabindex="0"]')?.focus();
}

export function closeSlides(refocus = true) {
  const open = document.body.dataset.slide;
  if (!open) return reachable();
  delete document.body.dataset.slide;
  reachable();
  if (refocus) document.querySelector(`[aria-controls="${open}"]`)?.focus();
}

export const small = matchMedia('(max-width: 720px)');
const medium = matchMedia('(max-width: 1099px)');
for (const size of [small, medium]) size.addEventListener('change', reachable);

/** Makes hidden slide-overs unreachable for keyboard and screen readers. */
function reachable() {
  if (!parts.side) return;
  const open = document.body.dataset.slide;
  parts.side.inert = small.matches && open !== 'side';
  parts.inspector.inert = medium.matches && open !== 'inspector';
  for (const name of ['side', 'inspector']) {
    for (const el of document.querySelectorAll(`[aria-controls="${name}"]`)) setAttr(el, 'aria-expanded', String(open === name));
  }
}

// The banner: agent, its status, connection state

function mountHeader(root) {
  const title = h('h1', { class: 'top-title', 'data-testid': 'title' });
  const status = h('span', { class: 'top-state', 'data-testid': 'agent-state' });
  const about = h('span', { class: 'top-about wide-only meta', dir: 'auto', 'data-testid': 'about' });
  const clock = h('span', { class: 'meta num', 'data-testid': 'elapsed' });
  const stopper = button({ class: 'stop-btn', 'data-testid': 'stop', onclick: () => stop(agent()?.id) }, icon('stop'), h('span', {}, t('stop')));
  const more = iconButton('more', t('conversationMenu'), { 'aria-haspopup': 'menu', 'data-testid': 'conversation-menu', onclick: () => import('./screens/conversation_menu.js').then((menu) => menu.openConversationMenu(more, agent()?.id)) });
  const chip = h('span', { class: 'chip', role: 'status', 'data-testid': 'connection' });
  fill(root,
    iconButton('menu', t('menu'), { class: 'only-small', 'aria-controls': 'side', 'aria-expanded': 'false', onclick: () => toggleSlide('side'), 'data-testid': 'menu' }),
    h('div', { class: 'top-who' }, title, status, clock, stopper, about),
    chip,
    more,
    button({ class: 'search-btn', 'aria-label': t('search'), 'data-testid': 'search', onclick: () => import('./keyboard.js').then((keys) => keys.openPalette()) },
      icon('search'), h('span', { class: 'wide-only' }, t('search')), h('kbd', { class: 'wide-only' }, keyNames('Ctrl K'))),
    iconButton('side', t('details'), { class: 'only-medium', 'aria-controls': 'inspector', 'aria-expanded': 'false', onclick: () => toggleSlide('inspector'), 'data-testid': 'details' }));

  const agent = () => {
    const at = shownAt();
    return at.name === 'a' || at.name === '' ? state.agents.get(at.args[0] ?? state.home) : undefined;
  };

  function paint() {
    const one = agent();
    const name = one ? one.name || one.id : shownAt().name === 'a' ? shownAt().args[0] : parts.screenTitle;
    setText(title, name || 'Coterie');
    setAttr(title, 'title', one?.description || null);
    setText(about, one?.description ?? '');
    parts.heading = name;
    documentTitle();
    fill(status, one ? [dot(one), h('span', {}, one.state === 'active' ? `${t('active')} · ${doing(one)}${steps(one)}` : t(one.state))] : []);
    if (isScripted(one)) status.append(h('span', { class: 'tag' }, t('tour')));
    status.className = `top-state is-${one?.state ?? 'none'}`;
    more.hidden = !one;
    stopper.hidden = one?.state !== 'active';
    stopper.setAttribute('aria-label', one ? t('stopAgent', { name: one.name }) : t('stop'));
    stopper.setAttribute('aria-disabled', String(stopping.has(one)));
    tick();
  }

  function tick() {
    const one = agent();
    setText(clock, one?.state === 'active' && one.since ? elapsed(now() - Date.parse(one.since)) : '');
  }

  function line() {
    const what = state.connection;
    chip.className = `chip chip-${what}`;
    setText(chip, what === 'ok' ? '' : t(what));
  }

  let watched = () => {};
  const follow = () => {
    watched();
    const id = agent()?.id;
    watched = id ? on([`agent:${id}`, `drafts:${id}`], paint) : () => {};
    paint();
  };
  document.addEventListener('screen', follow);
  const ends = [on(['agents', 'snapshot'], follow), on('connection', line), everySecond(tick)];
  follow();
  line();
  return () => {
    document.removeEventListener('screen', follow);
    watched();
    ends.forEach((end) => end());
  };
}

const steps = (one) => (one.phase === 'tool' && one.step ? ` ${t('stepOf', { n: one.step[0], m: one.step[1] })}` : '');

// Not authenticated

/** `isUsedLink`: the person has opened a one-time link a second time. */
export async function locked(isUsedLink) {
  const say = async (code) => {
    const { lockedTitle, lockedUsed, lockedHow } = await wordsOf(code);
    return h('section', { lang: code }, h('h2', {}, lockedTitle), isUsedLink && h('p', {}, lockedUsed), h('p', {}, lockedHow), h('p', {}, h('code', {}, 'coterie open')));
  };
  const card = h('main', { class: 'locked', 'data-testid': 'locked' }, h('h1', {}, 'Coterie'), await say(lang()), await say(otherLang()),
    button({ class: 'primary', onclick: () => location.reload() }, t('lockedAgain')));
  fill(document.getElementById('app'), card);
  document.getElementById('app').className = 'plain-page';
}
