// Work that repeats while the tab is visible.

/** How many times longer than the work itself the page waits at least, so that a slow server is asked less. */
const REST = 3;

/** The longest wait for a server that is slow or gone, in milliseconds. */
const MAX_WAIT_MS = 15_000;

/**
 * Do the work now and then every `seconds`, until the signal aborts. A hidden tab does nothing. Work that throws is
 * repeated; `failed` is called with its error.
 */
export async function repeat(signal, seconds, work, failed = () => {}) {
  while (!signal.aborted) {
    const began = performance.now();
    try {
      if (document.visibilityState === "visible") await work();
    } catch (error) {
      if (signal.aborted) return;
      failed(error);
    }
    const took = performance.now() - began;
    await pause(signal, Math.min(Math.max(seconds * 1000 - took, took * REST, 200), MAX_WAIT_MS));
  }
}

/** Wait, or return as soon as the signal aborts or the tab becomes visible. */
export function pause(signal, milliseconds) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const seen = () => document.visibilityState === "visible" && done();
    const timer = setTimeout(done, milliseconds);
    document.addEventListener("visibilitychange", seen);
    signal.addEventListener("abort", done);
  });
}
