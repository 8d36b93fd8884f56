// Sends a photograph and prints the boxes in it. Node 18 or later; a browser's fetch takes the same lines.
// Usage: node answer.mjs http://127.0.0.1:8000 MODEL PHOTO.jpg [TOKEN]
import { readFile } from "node:fs/promises";

const [address, model, photo, token] = process.argv.slice(2);
const response = await fetch(`${address}/v2/models/${model}/answer`, {
  method: "POST",
  headers: { "Content-Type": "image/jpeg", ...(token && { Authorization: `Bearer ${token}` }) },
  body: await readFile(photo),
});
const answer = await response.json();
if (!response.ok) throw new Error(answer.error);
for (const { label, score, box } of answer.detections) {
  console.log(label, score.toFixed(2), ...box.map(Math.round));
}
