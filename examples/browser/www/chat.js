import { MuxError, reconnecting } from "/muxkit.js";

const name = new URLSearchParams(location.search).get("name") ?? `guest ${Math.floor(Math.random() * 1000)}`;
const show = (id, text) => (document.getElementById(id).textContent = text);
const text = (bytes) => new TextDecoder().decode(bytes);
const slow = document.getElementById("slow");

let channel = null; // the chat of the session that we have now

function showState(isOnline, words) {
  show("state", words);
  document.getElementById("state").className = isOnline ? "online" : "offline";
}

function addLine(line) {
  const item = document.createElement("li");
  item.textContent = line; // never as HTML: others wrote it
  const lines = document.getElementById("lines");
  lines.append(item);
  item.scrollIntoView({ block: "nearest" });
}

document.getElementById("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const input = document.getElementById("text");
  if (!input.value || channel === null) return;
  const message = input.value;
  input.value = "";
  try {
    await channel.send(message);
  } catch (error) {
    addLine(`(not sent: ${error.message})`);
  }
});

async function chat(session) {
  channel = await session.open("chat", { payload: name });
  for await (const message of channel) {
    const event = JSON.parse(text(message));
    if (event.event === "presence") show("people", event.people.join(", "));
    else addLine(`${event.name}: ${event.text}`);
  }
}

/** Read numbers, except while the box is checked. What we don't read isn't granted to the server again. */
async function numbers(session) {
  const stream = await session.open("numbers", { payload: name });
  let read = 0;
  for await (const message of stream) {
    read = Number(text(message));
    if (read % 500 === 0 || slow.checked) {
      show("read", read.toLocaleString("en"));
      await new Promise((resolve) => setTimeout(resolve)); // let the page draw
    }
    if (slow.checked) await new Promise((resolve) => slow.addEventListener("change", resolve, { once: true }));
  }
}

async function gauges(session) {
  for (;;) {
    const trip = await session.ping();
    const sent = Number(text(await session.request(name)));
    show("trip", `${trip.toFixed(1)} ms`);
    show("sent", sent.toLocaleString("en"));
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

const failed = (error) => showState(false, `trying again (${error.message})`);
for await (const session of reconnecting(new URL("/", location.href), { onFailed: failed })) {
  showState(true, `online as ${name}`);
  try {
    await Promise.all([chat(session), numbers(session), gauges(session)]);
  } catch (error) {
    if (!(error instanceof MuxError)) throw error;
    showState(false, error.message);
    await session.closed;
  } finally {
    channel = null;
  }
}
