// Calls an operator, and another with groups of tensors, fills and takes a buffer, and tells an error by its code.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

type Problem = components["schemas"]["Problem"];

const client = createClient<paths>({ baseUrl: process.env.GRADSERVE_URL! });
const retried = { "Idempotency-Key": crypto.randomUUID() };
const path = { name: "typescript" };

function fault(problem: Problem): string {
  switch (problem.code) {
    case "shape_mismatch":
      return `${problem.code} of ${problem.tensor}`;
    case "busy":
    case "not_ready":
      return "try again";
    default:
      return problem.detail;
  }
}

// The type of an answer has a string for safetensors, which are not asked for here.
function taken<T>(answer: { data?: T; error?: Problem }): Exclude<T, string> {
  if (answer.data === undefined) throw new Error(fault(answer.error!));
  return answer.data as Exclude<T, string>;
}

const { dX } = taken(await client.POST("/v1/ops/ReluGrad", { body: { dY: [1, 2], X: [0.5, -1] } }));
if (dX === undefined || !("data" in dX)) throw new Error("the answer has no list");
console.log("relu", ...(dX.data as number[]));

const step = { lr: 1, weights: { "fc.bias": [3] }, gradients: { "fc.bias": [1] } };
const bias = taken(await client.POST("/v1/ops/SGDOptimizerV2", { body: step })).updated_weights?.["fc.bias"];
if (bias === undefined || !("data" in bias)) throw new Error("the answer has no group");
console.log("step", ...(bias.data as number[]));

taken(await client.PUT("/v1/buffers/{name}", { params: { path }, body: { shape: [2] } }));
for (let attempt = 0; attempt < 2; attempt++) {
  const body = { gradient: [1, 2] };
  const receipt = taken(await client.POST("/v1/buffers/{name}/accumulate", { params: { path, header: retried }, body }));
  if (receipt.count !== 1) throw new Error("a retry counts twice");
}
taken(await client.POST("/v1/buffers/{name}/accumulate", { params: { path }, body: { gradient: { data: [3, 4] } } }));
const { value } = taken(await client.POST("/v1/buffers/{name}/take", { params: { path, query: { min_count: 2 } } }));
if (value === undefined || !("data" in value)) throw new Error("the receipt has no value");
console.log("take", ...(value.data as number[]));

const { error } = await client.POST("/v1/ops/ReluGrad", { body: { dY: [1, 2], X: [1] } });
console.log("error", fault(error!));
