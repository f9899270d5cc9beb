// Runs the search in a hidden frame if the site was opened as files, because browsers start no worker from a file.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const worker = frame.contentWindow
      worker.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script")
        script.addEventListener("load", () => resolve(worker))
        script.src = url
        frame.contentDocument.head.append(script)
      })
    }

    postMessage(data) {
      this.loaded.then((worker) => worker.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

// Options such as --pcm are searched as words. The search would read hyphens as operators, and refuse some of them.
const send = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = typeof message?.data === "string"
  send.call(this, isQuery ? { ...message, data: message.data.replace(/[-+~:^]+/g, " ").trim() } : message, ...rest)
}
