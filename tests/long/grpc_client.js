// Calls a server with gRPC for JavaScript. Arguments: address of the server, path of inference.proto.
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, protoFile] = process.argv.slice(2);
const options = { keepCase: true, longs: String, defaults: true };
const { inference } = grpc.loadPackageDefinition(loader.loadSync(protoFile, options));
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure(), {
  'grpc.max_send_message_length': -1,
});

const question = Buffer.from('Who wrote Hamlet ?');
const length = Buffer.alloc(4);
length.writeUInt32LE(question.length);
const request = {
  model_name: 'question-type',
  inputs: [{ name: 'text', datatype: 'BYTES', shape: [1] }],
  raw_input_contents: [Buffer.concat([length, question])],
};

function infer(message) {
  return new Promise((resolve, reject) => {
    client.ModelInfer(message, (error, reply) => (error ? reject(error) : resolve(reply)));
  });
}

async function codeOf(message) {
  try {
    await infer(message);
    return 'no error';
  } catch (error) {
    return `code ${error.code} ${error.metadata.get('seqserve-code')[0]}`;
  }
}

function countReplies(count) {
  return new Promise((resolve) => {
    const stream = client.ModelStreamInfer();
    let replies = 0;
    stream.on('data', () => {
      replies += 1;
      if (replies === count) stream.end();
    });
    stream.on('end', () => resolve(replies));
    for (let number = 0; number < count; number += 1) stream.write(request);
  });
}

function cancel() {
  return new Promise((resolve) => {
    const call = client.ModelInfer(request, (error) => resolve(error ? error.code : 0));
    call.cancel();
  });
}

async function main() {
  const reply = await infer(request);
  console.log(reply.outputs[0].name, reply.raw_output_contents[0].subarray(4).toString());
  console.log((await Promise.all(Array.from({ length: 500 }, () => infer(request)))).length, 'answers');
  console.log(await codeOf({ ...request, model_name: 'nobody' }));
  console.log(await codeOf({ ...request, raw_input_contents: [Buffer.alloc(20 << 20)] }));
  console.log(await countReplies(50), 'replies on a stream');
  console.log('cancelled', await cancel());
  client.ServerReady({}, (error, status) => {
    console.log('ready', status.ready);
    client.close();
  });
}

main();
