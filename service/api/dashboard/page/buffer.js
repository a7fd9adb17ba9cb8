// One buffer.

import { h, put } from "./dom.js";

export async function show(main, { api, parameters, signal }) {
  const info = await api.get(`v1/buffers/${encodeURIComponent(parameters.name)}`, { signal });
  put(main, h("h1", {}, info.name));
}
