// All buffers, as a table.

import { h, put } from "./dom.js";
import { repeat } from "./repeat.js";

export async function show(main, { api, signal }) {
  const list = h("ul");
  put(main, h("h1", {}, "Buffers"), list);
  await repeat(signal, 2, async () => {
    const { buffers } = await api.get("v1/buffers?limit=1000", { signal });
    put(list, buffers.map((each) => h("li", {}, h("a", { href: `#/buffers/${encodeURIComponent(each.name)}` }, each.name))));
  });
}
