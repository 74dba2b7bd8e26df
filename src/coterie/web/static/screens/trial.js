// What came of trying a service out, in the page's own language: the server gives a code, and its words in English.

import { h } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';

export function outcomeOf(trial) {
  if (!trial) return [h('span', { class: 'tag', text: t('untested') })];
  const told = trial.ok ? t('trial_ok', { s: (trial.ms / 1000).toFixed(1) }) : t(`trial_${trial.code}`);
  return [
    h('span', { class: trial.ok ? 'tag ok' : 'tag bad', text: t(trial.ok ? 'trialOk' : 'trialBad') }),
    ' ',
    h('span', { text: told, title: dayAndTime(trial.at) }),
    trial.detail && h('span', { class: 'meta block', dir: 'auto', text: trial.detail }),
  ].filter(Boolean);
}
