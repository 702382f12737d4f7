// Lets people search for options: to the search `--resume` is a word to leave out, twice, and it would find nothing.
(() => {
  const QUERY = 2;
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message?.type === QUERY && typeof message.data === "string") {
      message = { ...message, data: message.data.replace(/(^|\s)--+(?=\w)/g, "$1") };
    }
    return post.call(this, message, ...rest);
  };
})();
