// Encodes gradients in 8 bits by the rule of docs/buffers.md, and compares the bits with the server's.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

type Problem = components["schemas"]["Problem"];

const client = createClient<paths>({ baseUrl: process.env.GRADSERVE_URL! });

function encode(numbers: Float32Array): { codes: Int8Array; scales: Float32Array } {
  const codes = new Int8Array(numbers.length), scales = new Float32Array(Math.ceil(numbers.length / 256));
  for (let block = 0; block < scales.length; block++) {
    const part = numbers.subarray(256 * block, 256 * (block + 1));
    const scale = Math.fround(Math.max(...part.map(Math.abs)) / 127);
    scales[block] = scale;
    if (scale > 0 && Number.isFinite(scale)) codes.set(part.map((x) => code(Math.fround(x / scale))), 256 * block);
  }
  return { codes, scales };
}

function code(quotient: number): number {
  const isTie = Math.abs(quotient % 1) === 0.5;
  const nearest = isTie ? 2 * Math.round(quotient / 2) : Math.round(quotient);
  return Math.max(-127, Math.min(127, nearest));
}

function base64(array: Float32Array | Int8Array): string {
  return Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");
}

// The type of an answer has a string for safetensors, which are not asked for here.
function taken<T>(answer: { data?: T; error?: Problem }): Exclude<T, string> {
  if (answer.data === undefined) throw new Error(answer.error!.detail);
  return answer.data as Exclude<T, string>;
}

const tie = Math.fround(2 / 127);
const random = Float32Array.from({ length: 3000 }, (_, k) => Math.sin(k * k) * 10 ** ((k % 80) - 44));
const ties = Float32Array.from({ length: 256 }, (_, k) => (k ? (k - 127.5) * tie : 2));
const cases = { random, ties, zeros: new Float32Array(300), documents: Float32Array.of(0.5, -1, 2, 0.1) };

for (const [name, numbers] of Object.entries(cases)) {
  const { codes, scales } = encode(numbers);
  const path = { name: `codes.${name}` }, shape = [numbers.length];
  taken(await client.PUT("/v1/buffers/{name}", { params: { path }, body: { shape } }));
  const dense = { dtype: "float32" as const, shape, base64: base64(numbers) };
  taken(await client.POST("/v1/buffers/{name}/accumulate", { params: { path }, body: { gradient: dense } }));
  const query = { encoding: "int8" as const };
  const { coded } = taken(await client.POST("/v1/buffers/{name}/take", { params: { path, query } }));
  if (coded?.codes.base64 !== base64(codes)) throw new Error(`the server has other codes of ${name}`);
  if (coded.scales.base64 !== base64(scales)) throw new Error(`the server has other scales of ${name}`);

  const gradient = {
    codes: { dtype: "int8" as const, shape, base64: base64(codes) },
    scales: { dtype: "float32" as const, shape: [scales.length], base64: base64(scales) },
  };
  taken(await client.POST("/v1/buffers/{name}/accumulate", { params: { path }, body: { gradient } }));
  const { value } = taken(await client.POST("/v1/buffers/{name}/take", { params: { path, query: { encoding: "base64" } } }));
  const decoded = Float32Array.from(codes, (one, k) => one * scales[k >> 8]!);
  if (value?.base64 !== base64(decoded)) throw new Error(`the server has another sum of ${name}`);
  console.log(name, codes.length, scales.length);
}
console.log(...encode(cases.documents).codes);
