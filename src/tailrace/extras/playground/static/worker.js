// The worker of the playground: Python as WebAssembly, which answers one question after the other.
// The page starts it from a blob, so that the policy of the page holds here, too: no connection but to its own files.

const say = (message) => postMessage(message);

async function bytesOf(address) {
  const reply = await fetch(address);
  if (!reply.ok) throw new Error(`${address}: ${reply.status}`);
  return reply.arrayBuffer();
}

async function start(base) {
  say({ doing: "Python is loading", share: 0.05 });
  const { loadPyodide } = await import(`${base}pyodide/pyodide.mjs`);
  const packages = bytesOf(`${base}packages.zip`);
  const python = await loadPyodide({ indexURL: `${base}pyodide/` });
  say({ doing: "the simulator is loading", share: 0.5 });
  const site = python.runPython("import site; site.getsitepackages()[0]");
  python.unpackArchive(await packages, "zip", { extractDir: site });
  say({ doing: "the simulator is starting", share: 0.6 });
  const answered = python.runPython(`
import asyncio, importlib
importlib.invalidate_caches()
from tailrace.extras.playground.simulation import answered
def alone(question):
    asyncio._set_running_loop(None)  # Pyodide's own loop: virtual time has another
    return answered(question)
alone`);
  say({ python: python.version });
  onmessage = ({ data }) => {
    let answer;
    try { answer = JSON.parse(answered(data.question)); } catch (why) { answer = { problem: `the simulator ended: ${String(why).trim().split("\n").at(-1)}`, ended: true }; }
    say({ number: data.number, answer });
  };
}

onmessage = ({ data }) => start(data.base).catch((why) => say({ failed: String(why.message || why) }));
