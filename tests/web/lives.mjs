// Random lives of channels and requests: the half of tests/web/_lives.py that runs in Node or in a page. Both ends open
// channels to each other. The opening of each holds its plan as JSON, so each end knows every byte that the other has to
// send.

const text = (bytes) => new TextDecoder().decode(bytes);
let ChannelCancelled;
let ChannelStopped;
const failures = []; // of all lives of this program or page, some of which may live at the same time
const PATTERN = Uint8Array.from({ length: 251 + 1_000_000 }, (_, index) => index % 251);

/** The message number `index` of a life: `size` bytes that the seed and the index decide. */
const messageOf = (seed, index, size) => PATTERN.subarray((seed + index) % 251, ((seed + index) % 251) + size);

function check(isRight, what) {
  if (!isRight) failures.push(what);
}

function equal(got, expected) {
  return got.length === expected.length && got.every((byte, index) => byte === expected[index]);
}

/** Check that the messages of a channel are the first ones of a plan; return how many came, and how the channel ended. */
async function receiveAll(channel, seed, sizes, pauses) {
  let index = 0;
  try {
    for await (const message of channel) {
      check(index < sizes.length && equal(message, messageOf(seed, index, sizes[index])), `life ${seed}: message ${index}`);
      index += 1;
      if (pauses.includes(index)) await new Promise((resolve) => setTimeout(resolve, 1));
    }
    return [index, null];
  } catch (error) {
    if (!(error instanceof ChannelCancelled)) throw error;
    return [index, error];
  }
}

async function sendAll(channel, seed, sizes) {
  for (const [index, size] of sizes.entries()) await channel.send(messageOf(seed, index, size));
}

/** Send what the plan says, and receive what the other side has to send back. */
async function openLife(session, plan) {
  const { seed, up, down, ends, pauses } = plan;
  const channel = await session.open("life", { payload: JSON.stringify(plan) });
  if (ends === "abort") {
    await sendAll(channel, seed, up.slice(0, -1));
    channel.abort(`broken off ${seed}`, { code: seed });
    return;
  }
  const receiving = ends === "stop" ? channel.receive() : receiveAll(channel, seed + 1, down, pauses);
  await sendAll(channel, seed, up);
  await channel.finish();
  const outcome = await receiving;
  if (ends === "stop") await channel.close();
  else check(outcome[0] === down.length && outcome[1] === null, `life ${seed}: ended after ${outcome}`);
}

async function acceptLife(channel) {
  const { seed, up, down, ends, pauses } = JSON.parse(text(channel.opening));
  check(channel.name === "life", `life ${seed}: its name is ${channel.name}`);
  const [count, error] = await receiveAll(channel, seed, up, pauses);
  if (ends === "abort") {
    // Python writes as much of the reason as there is credit for when it aborts, and right after opening there is none.
    const isCut = error !== null && error.reason === "" && error.code === 0;
    const isWhole = error?.reason === `broken off ${seed}` && error.code === seed;
    check(isWhole || isCut, `life ${seed}: aborted with ${error}`);
    check(count < up.length, `life ${seed}: all messages came`);
    await channel.close();
    return;
  }
  check(count === up.length && error === null, `life ${seed}: ended after ${count} with ${error}`);
  try {
    await sendAll(channel, seed + 1, down);
    await channel.finish();
  } catch (stopped) {
    if (ends !== "stop" || !(stopped instanceof ChannelStopped)) throw stopped;
  }
}

async function askLife(session, { seed, up }) {
  const response = await session.request(messageOf(seed, 0, up[0]));
  check(equal(response, messageOf(seed, 0, up[0]).slice().reverse()), `request ${seed}: the response is wrong`);
}

/** Live one session with the server at `url`; return which messages were wrong, how many channels came, and the end. */
export async function live(muxkit, url, plans) {
  ({ ChannelCancelled, ChannelStopped } = muxkit);
  const session = await muxkit.connect(url);
  const accepted = [];
  const accepting = (async () => {
    for await (const channel of session.incoming) accepted.push(acceptLife(channel));
  })();
  const answering = (async () => {
    for await (const request of session.requests) request.respond(request.payload.slice().reverse());
  })();
  await Promise.all(plans.map((plan) => (plan.ends === "request" ? askLife(session, plan) : openLife(session, plan))));
  await session.request("over"); // all channels of this side have been opened before
  await session.draining; // the other side says so when its lives are over
  await accepting;
  await answering;
  await Promise.all(accepted);
  await session.close();
  const ended = await session.closed;
  return { failures, accepted: accepted.length, ended: ended === null ? null : `${ended.name}: ${ended.message}` };
}
