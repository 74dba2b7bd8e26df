// HTTP client. Every error is a `Problem` with the server's code.

const BASE = '/api/v1';
const SURE_MS = 10_000;
const TRIES = 4;

class Problem extends Error {
  /** `status` 0: no answer. Code `timeout`: the server may or may not have handled the request; `error`: the answer is not Coterie's. */
  constructor(status, code, detail, more = {}) {
    super(detail);
    Object.assign(this, { status, code, detail, more });
  }
}

let onLocked = () => {};

/** Calls `locked` when the server answers 401. */
export const whenLocked = (locked) => {
  onLocked = locked;
};

/** A random unique id. Works on plain http too, where randomUUID is missing. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

async function call(method, path, body, timeout = 30_000) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), timeout);
  try {
    return await read(await fetch(BASE + path, { method, signal: stop.signal, headers: body && { 'content-type': 'application/json' }, body: JSON.stringify(body) }));
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(0, stop.signal.aborted ? 'timeout' : 'unreachable');
  } finally {
    clearTimeout(timer);
  }
}

async function read(response) {
  if (response.ok) return response.status === 204 ? null : response.json();
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) onLocked();
  throw new Problem(response.status, problem.code ?? 'error', problem.detail ?? response.statusText, problem);
}

export const get = (path) => call('GET', path);
export const post = (path, body = {}, timeout) => call('POST', path, body, timeout);
export const put = (path, body) => call('PUT', path, body);
export const patch = (path, body) => call('PATCH', path, body);
export const del = (path) => call('DELETE', path);
export const query = (path, values) => {
  const text = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== ''));
  return get(`${path}?${text}`);
};

/**
 * Sends a message. After ten seconds without an answer it retries with the same clientId, so there is only one message.
 * `unsure` is called before each new attempt.
 */
export async function send(message, unsure = (_attempt) => {}) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await post('/messages', message, SURE_MS);
    } catch (error) {
      if (error.code !== 'timeout' || attempt === TRIES) throw error;
      unsure(attempt);
    }
  }
}

/** Uploads one file; calls `progress` with a fraction from 0 to 1. Returns `{done, cancel}`. */
export function upload(file, progress) {
  const request = new XMLHttpRequest();
  const done = new Promise((resolve, reject) => {
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onloadend = () => {
      const { status, response } = request;
      if (status === 201) resolve(response);
      else reject(new Problem(status, response?.code ?? 'error', response?.detail));
    };
  });
  const form = new FormData();
  form.append('file', file, file.name || 'file');
  request.open('POST', `${BASE}/artifacts`);
  request.responseType = 'json';
  request.send(form);
  return { done, cancel: () => request.abort() };
}

export const artifactUrl = (ref) => `${BASE}/artifacts/${encodeURIComponent(ref)}`;
