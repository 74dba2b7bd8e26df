// The server's HTTP interface. Every refusal is a `Problem` with the server's own code.

const BASE = '/api/v1';
const SURE_MS = 10_000;
const TRIES = 4;

export class Problem extends Error {
  /** `status` 0: no answer came. `unknown`: whether the request was heard is not known. */
  constructor(status, code, detail, more = {}) {
    super(detail);
    Object.assign(this, { status, code, detail, more });
  }

  get unknown() {
    return this.code === 'timeout';
  }
}

let onLocked = () => {};

/** Calls `tell` when the server does not know this browser. */
export const whenLocked = (tell) => {
  onLocked = tell;
};

/** A name that is ours alone. Works outside secure contexts too, where randomUUID is missing. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

export async function call(method, path, body, { signal, timeout = 30_000 } = {}) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort('timeout'), timeout);
  signal?.addEventListener('abort', () => abort.abort());
  try {
    const response = await fetch(BASE + path, {
      method,
      signal: abort.signal,
      headers: body === undefined ? {} : { 'content-type': 'application/json' },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: 'same-origin',
    });
    return await read(response);
  } catch (error) {
    if (error instanceof Problem) throw error;
    if (abort.signal.reason === 'timeout') throw new Problem(0, 'timeout', 'no answer in time');
    throw new Problem(0, signal?.aborted ? 'aborted' : 'unreachable', String(error?.message ?? error));
  } finally {
    clearTimeout(timer);
  }
}

async function read(response) {
  if (response.ok) return response.status === 204 ? null : response.json();
  const told = await response.json().catch(() => ({}));
  if (response.status === 401) onLocked();
  throw new Problem(response.status, told.code ?? 'error', told.detail ?? response.statusText, told);
}

export const get = (path, options) => call('GET', path, undefined, options);
export const post = (path, body, options) => call('POST', path, body ?? {}, options);
export const put = (path, body) => call('PUT', path, body);
export const del = (path) => call('DELETE', path);
export const query = (path, values) => {
  const text = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== ''));
  return get(`${path}?${text}`);
};

/**
 * Sends a message. No answer for ten seconds: asked again under the same name, so it is one message whatever happened.
 * `unsure` is called before each new attempt.
 */
export async function send(message, unsure = () => {}) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await post('/messages', message, { timeout: SURE_MS });
    } catch (error) {
      if (!error.unknown || attempt === TRIES) throw error;
      unsure(attempt);
    }
  }
}

/** Uploads one file; `progress` hears a share from 0 to 1. Returns `{done, cancel}`. */
export function upload(file, progress) {
  const request = new XMLHttpRequest();
  const done = new Promise((resolve, reject) => {
    const refuse = (code, detail) => reject(new Problem(request.status, code, detail));
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => refuse('unreachable', 'no connection');
    request.onabort = () => refuse('aborted', 'cancelled');
    request.onload = () => {
      const told = parsed(request.responseText);
      if (request.status === 201) resolve(told);
      else refuse(told.code ?? 'error', told.detail ?? request.statusText);
    };
  });
  const form = new FormData();
  form.append('file', file, file.name || 'file');
  request.open('POST', `${BASE}/artifacts`);
  request.send(form);
  return { done, cancel: () => request.abort() };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}

export const artifactUrl = (ref) => `${BASE}/artifacts/${encodeURIComponent(ref)}`;
