// Train a graph as one of several workers: node train.mjs URL MODEL.onnx DATA.json RUN RANK WORKERS STEPS
import { readFileSync, writeFileSync } from "node:fs";
import { setTimeout } from "node:timers/promises";

const [url, model, data, run, ...numbers] = process.argv.slice(2);
const [rank, workers, steps] = numbers.map(Number);
const rows = Object.entries(JSON.parse(readFileSync(data, "utf8")));

/** Send a request until it is done. With a key it counts once, however often it is sent. */
async function call(method, path, { key, type = "application/json", body } = {}) {
  const headers = { "Content-Type": type, ...(key && { "Idempotency-Key": run + key }) };
  for (let told = -Infinity; ; await setTimeout(100)) {
    let cause;
    try {
      const response = await fetch(`${url}/v1${path}`, { method, headers, body });
      if (response.ok) return await response.json();
      const { code, detail = response.statusText } = await response.json().catch(() => ({}));
      cause = detail;
      if (response.status < 500 && response.status !== 429 && code !== "step_open") {
        console.error(`${url}: ${cause}`);
        process.exit(1);
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      cause = error.cause?.message || error.cause?.code || error.message; // the server is away
    }
    if (performance.now() - told < 60_000) continue;
    console.error(`${url}: ${cause}; trying again`);
    told = performance.now();
  }
}

const put = `/graphs/${run}?loss=SoftmaxCrossEntropyLoss&set=parameters:${run}.p.*`;
const { parameters } = await call("PUT", put, { key: ":put", type: "application/onnx", body: readFileSync(model) });
const buffers = {};
const contributors = Array.from({ length: workers }, (_, other) => `rank${other}`);
for (const [name, { shape }] of Object.entries(parameters)) {
  buffers[`${run}.g.${name}`] = { shape, quorum: workers, contributors };
  buffers[`${run}.m.${name}`] = buffers[`${run}.v.${name}`] = { shape };
}
await call("POST", "/buffers/create", { body: JSON.stringify({ buffers }) });
const { version } = await call("GET", `/buffers/${run}.p.${Object.keys(parameters)[0]}`); // each step writes it once

for (let step = version - 1; step < steps; step++) {
  const start = (count) => ((step * workers + rank) * 32) % count;
  const batch = rows.map(([name, all]) => [name, all.slice(start(all.length), start(all.length) + 32)]);
  const micro = `from=parameters:${run}.p.*&into=gradients:${run}.g.*&outputs=loss&weight=32&step=${step}&contributor=rank${rank}`;
  const body = JSON.stringify(Object.fromEntries(batch));
  const { loss } = await call("POST", `/graphs/${run}?${micro}`, { key: `:${step}:${rank}`, body });
  console.log(step, loss.data);
  const read = `from=weights:${run}.p.*&from=gradients:${run}.g.*@${step}&from=momentums_1:${run}.m.*&from=momentums_2:${run}.v.*`;
  const write = ["weights:p", "momentums_1:m", "momentums_2:v"].map((pair) => `set=updated_${pair.replace(":", `:${run}.`)}.*`);
  const adam = `/ops/AdamWOptimizer?reduce=mean&timeout=5&${read}&${write.join("&")}`;
  await call("POST", adam, { key: `:${step}`, body: `{"lr": 0.01, "step": ${step + 1}}` });
}
writeFileSync(`${run}.json`, JSON.stringify(await call("POST", `/buffers/value?prefix=${run}.p.`)));
