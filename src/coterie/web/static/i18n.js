// Every word of the page, in English and Chinese. `t('key', {name: 'Ada'})` fills `{name}`.

const KEPT = 'coterie.language';

// prettier-ignore
const words = {
  // The shell
  appName: ['Coterie', 'Coterie'],
  skip: ['Skip to the message box', '跳到输入框'],
  menu: ['Agents and screens', '智能体与页面'],
  search: ['Search', '搜索'],
  setup: ['Setup', '设置'],
  details: ['Details', '详情'],
  close: ['Close', '关闭'],
  retry: ['Retry', '重试'],
  edit: ['Edit', '编辑'],
  remove: ['Delete', '删除'],
  cancel: ['Cancel', '取消'],
  copy: ['Copy', '复制'],
  copied: ['Copied', '已复制'],
  open: ['Open', '打开'],
  more: ['Show more', '显示更多'],
  theme: ['Theme', '主题'],
  themeAuto: ['Theme: as the system', '主题：跟随系统'],
  themeLight: ['Theme: light', '主题：浅色'],
  themeDark: ['Theme: dark', '主题：深色'],
  language: ['中文', 'English'],
  languageLabel: ['切换到中文', 'Switch to English'],
  shortcuts: ['Keyboard shortcuts', '键盘快捷键'],
  regionAgents: ['Agents', '智能体'],
  regionInspector: ['Inspector', '检查栏'],
  tabs: ['Inspector', '检查栏'],
  you: ['You', '我'],
  system: ['System', '系统'],
  failedToLoad: ['This did not load.', '没有加载成功。'],

  // Screens
  inbox: ['My messages', '我的消息'],
  waitingForYou: ['Waiting for you', '等你回答'],
  timeline: ['Timeline', '时间线'],
  org: ['Organisation', '组织'],
  delayed: ['Delayed', '延迟'],
  artifacts: ['Artifacts', '产物'],
  conversation: ['Conversation', '对话'],

  // Not let in
  lockedTitle: ['This browser is not let in yet', '此浏览器尚未获准进入'],
  lockedHow: ['Run this on the machine where the society runs, and follow the link it prints:', '在运行该社会的机器上执行下面的命令，并打开它给出的链接：'],
  lockedAgain: ['I have opened the link', '我已打开链接'],
  oldBrowser: ['This browser is too old for the panel.', '此浏览器版本过旧，无法使用面板。'],
  serverAway: ['The server does not answer. This page tries again by itself.', '服务器没有响应，页面会自动重试。'],

  // Agents
  filter: ['Filter by name or role', '按名字或岗位筛选'],
  noMatch: ['Nobody by that name', '没有符合的智能体'],
  noAgents: ['There are no agents yet', '还没有智能体'],
  idle: ['Idle', '空闲'],
  active: ['Working', '工作中'],
  paused: ['Paused', '已暂停'],
  blocked: ['Stuck', '出错'],
  terminated: ['Terminated', '已终止'],
  phase_starting: ['Starting', '准备'],
  phase_thinking: ['Thinking', '思考'],
  phase_replying: ['Replying', '回复'],
  phase_tool: ['Tool', '工具'],
  phase_approval: ['Waiting for your approval', '等待你的批准'],
  phase_retry: ['Waiting to retry', '等待重试'],
  stepOf: ['{n}/{m}', '{n}/{m}'],
  unread: ['{n} unread', '{n} 条未读'],
  waitsForYou: ['waiting for you', '等你回答'],
  stop: ['Stop', '停止'],
  stopAgent: ['Stop {name}', '停止{name}'],
  stopping: ['Stopping', '正在停止'],
  pause: ['Pause', '暂停'],
  resume: ['Resume', '继续'],
  tour: ['Tour', '导览'],
  noModel: ['No model service yet: a scripted tour answers.', '还没有可用的模型服务：由导览应答'],
  setUpModel: ['Set up a model', '设置模型'],
  takesIn: ['Takes in', '可接收'],
  cap_text: ['text', '文本'],
  cap_vision: ['images', '图片'],
  cap_audio: ['audio', '音频'],
  cap_file: ['files', '文件'],

  // Connection
  reconnecting: ['Reconnecting', '正在重连'],
  offline: ['Offline, you can go on writing', '离线，可继续写'],
  restored: ['Connected again', '已恢复'],
  stopped: ['The server has stopped', '服务已停止'],
  stoppedEarly: ['The server has stopped; {n} delayed messages were delivered early', '服务已停止；{n} 条延迟消息已提前投递'],

  // Thread
  thread: ['Conversation with {name}', '与{name}的对话'],
  today: ['Today', '今天'],
  yesterday: ['Yesterday', '昨天'],
  newMessages: ['{n} new messages', '{n} 条新消息'],
  newMessage: ['1 new message', '1 条新消息'],
  toEnd: ['To the latest message', '到最新消息'],
  loadingOlder: ['Loading earlier messages', '正在加载更早的消息'],
  olderFailed: ['Earlier messages did not load', '更早的消息没取到'],
  threadFailed: ['The conversation did not load', '对话没有取到'],
  firstWords: ['Write the first line', '写第一句话'],
  starter1: ['What can you do?', '你能做什么？'],
  starter2: ['Who else is here, and what do they do?', '这里还有谁，各自负责什么？'],
  starter3: ['Remind me in ten minutes to take a break', '十分钟后提醒我休息一下'],
  noSuchAgent: ['There is no agent “{name}”', '没有名为“{name}”的智能体'],
  sending: ['Sending', '正在发送'],
  unsure: ['Not confirmed yet, trying again', '还没确认，正在重试'],
  delivered: ['Delivered', '已送达'],
  waiting: ['Waiting', '等待中'],
  taken: ['Taken', '已处理'],
  scheduled: ['Scheduled for {time}', '定于 {time}'],
  failed: ['Not sent', '没有发出去'],
  replyStopped: ['Stopped', '已停止'],
  streaming: ['Replying', '正在回复'],
  early: ['Delivered early', '提前投递'],
  retracted: ['Withdrawn', '已撤回'],
  replyTo: ['Reply to this', '回复此条'],
  replyingTo: ['Reply to: {text}', '回复：{text}'],
  rawJson: ['Show JSON', '查看 JSON'],
  fields: ['Structured message', '结构化消息'],
  interjectionsTaken: ['Interjections taken', '插话已处理'],
  callsCancelled: ['{n} tool calls that had not run were cancelled', '取消了 {n} 个未执行的工具调用'],
  callCancelled: ['1 tool call that had not run was cancelled', '取消了 1 个未执行的工具调用'],
  image: ['Image', '图片'],
  linkTo: ['{text} ({host})', '{text}（{host}）'],
  enlarge: ['Enlarge {name}', '放大 {name}'],
  download: ['Download {name}', '下载 {name}'],
  task_done: ['done', '已完成'],
  task_open: ['to do', '未完成'],

  // Problems
  problem_auth: ['The model service did not accept the key.', '模型服务没有接受密钥。'],
  problem_rate_limit: ['The model service is asked too often.', '模型服务请求过于频繁。'],
  problem_network: ['The model service cannot be reached.', '连不上模型服务。'],
  problem_context_length: ['The conversation is too long for the model.', '对话对该模型来说太长了。'],
  problem_server: ['The model service failed.', '模型服务出错了。'],
  problem_quota: ['Today’s limit is spent.', '今天的额度已用完。'],
  problem_other: ['Something went wrong.', '出了点问题。'],
  problemRetryIn: ['Tries again in {time}', '{time} 后重试'],
  problemHow: ['Its message is kept. Once this is put right, retry.', '消息已保留。修正后请重试。'],

  // Runs
  ranTools: ['Ran {n} tools', '连续执行 {n} 个工具'],
  ranTool: ['Ran {name}', '执行 {name}'],
  runningTool: ['Running {name}', '正在执行 {name}'],
  run_ok: ['ok', '成功'],
  run_failed: ['failed', '失败'],
  run_running: ['running', '执行中'],
  run_withdrawn: ['not run: cancelled by an interjection', '未执行：被插话取消'],
  run_cancelled: ['not run: stopped', '未执行：已停止'],
  run_unknown: ['outcome unknown', '结果未知'],
  run_planned: ['planned', '待执行'],
  run_gated: ['waits for approval', '等待批准'],
  arguments: ['Arguments', '参数'],
  result: ['Result', '结果'],
  sentTo: ['Message to {name}', '发给{name}的消息'],

  // Quick replies
  quickReplies: ['Quick replies', '快速回复'],
  qrSending: ['Sending…', '正在发送…'],
  qrChosen: ['You chose option {n}', '已选择第 {n} 项'],
  qrCustom: ['Answered in your own words', '已用自定义回复'],
  qrTerminated: ['This agent has been terminated', '该智能体已终止'],
  qrElsewhere: ['Already answered in another window', '已在另一个窗口回复'],
  qrFailed: ['Not sent: {option}', '没有发出去：{option}'],
  qrFull: ['Show the full options', '显示完整选项'],
  qrShort: ['Shorten the options', '收起完整选项'],
  qrArrived: ['{n} quick replies, press Alt+Q to choose.', '有 {n} 个快速回复，按 Alt+Q 选择。'],

  // Composer
  writeTo: ['Write to {name}', '给{name}写消息'],
  writeToActive: ['Write to {name} (at work: this will be an interjection)', '给{name}写消息（正在工作，会作为插话）'],
  hintActive: ['{name} is at work. What you send now is an interjection.', '{name}正在工作，现在发送会作为插话。'],
  send: ['Send', '发送'],
  attach: ['Attach files', '添加附件'],
  recipientGone: ['{name} has been terminated and takes no messages.', '{name}已终止，不再接收消息。'],
  tooLong: ['Too long by {n} characters: attach it as a file', '超出 {n} 个字符：请作为文件附上'],
  attachments: ['Attachments', '附件'],
  uploading: ['{n} %', '{n} %'],
  uploadTooBig: ['Too big', '太大'],
  uploadFailed: ['Upload failed', '上传失败'],
  asOriginal: ['as it is', '原样'],
  asText: ['as a description ({name} does not take {kind})', '文字说明（{name}不支持{kind}）'],
  sendInstead: ['Send to {name} instead', '改发给{name}'],
  removeFile: ['Remove {name}', '移除 {name}'],
  retryFile: ['Upload {name} again', '重新上传 {name}'],
  dropHere: ['Drop files to attach them', '松开以添加附件'],
  kind_image: ['images', '图片'],
  kind_audio: ['audio', '音频'],
  kind_file: ['files', '文件'],
  waitsForUploads: ['Sent when the uploads are done', '上传完成后发送'],
  notSent: ['Not sent: {text}', '没有发出去：{text}'],
  ctrlEnterSends: ['Ctrl+Enter sends', 'Ctrl+Enter 发送'],

  // Waiting strip
  strip: ['Waiting interjections', '等待中的插话'],
  interjection: ['Interjection {n}/{m}', '插话 {n}/{m}'],
  interjectionsWait: ['{n} interjections waiting', '插话 {n} 条等待'],
  withdraw: ['Withdraw', '撤回'],
  withdrawing: ['Withdrawing', '正在撤回'],
  tooLate: ['Already taken, it cannot be withdrawn', '已被处理，无法撤回'],

  // Announcements
  said: ['{name}: {text}', '{name}：{text}'],
  startsReply: ['{name} starts to reply', '{name}开始回复'],
  hasNews: ['{name} has a new message', '{name}有新消息'],

  // Toasts
  notices: ['Notices', '通知'],
  actionFailed: ['That did not work: {detail}', '没有成功：{detail}'],
};

/** Further words, of a screen that is loaded later. */
export const addWords = (more) => Object.assign(words, more);
export const keys = () => Object.keys(words);

let language = localStorage.getItem(KEPT) ?? (/^zh\b/i.test(navigator.language) ? 'zh' : 'en');
if (language !== 'zh') language = 'en';

export const lang = () => language;
export const locale = () => (language === 'zh' ? 'zh-CN' : navigator.language.startsWith('en') ? navigator.language : 'en');

export function setLang(next) {
  language = next === 'zh' ? 'zh' : 'en';
  localStorage.setItem(KEPT, language);
  formats.clear();
  document.documentElement.lang = language;
}
document.documentElement.lang = language;

export function t(key, values) {
  const found = words[key];
  const text = found ? found[language === 'zh' ? 1 : 0] : key;
  return values ? text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole)) : text;
}

// Times, sizes

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

export const dayKey = (when) => midnight(new Date(when));
const midnight = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();

/** 00:41, 1:02:03 */
export function elapsed(ms) {
  const all = Math.max(0, Math.floor(ms / 1000));
  const two = (n) => String(n).padStart(2, '0');
  const hours = Math.floor(all / 3600);
  return `${hours ? `${hours}:` : ''}${two(Math.floor(all / 60) % 60)}:${two(all % 60)}`;
}

export const seconds = (ms) => (ms < 950 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  if (size < 1_000_000) return `${Math.round(size / 1000)} KB`;
  return `${(size / 1_000_000).toFixed(1)} MB`;
}
