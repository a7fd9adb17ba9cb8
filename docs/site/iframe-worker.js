// The search runs in a Worker, and browsers start none for pages of file://. There, a hidden frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise((resolve, reject) => {
        frame.onload = () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = url;
          script.onload = () => resolve(scope);
          script.onerror = reject;
          frame.contentDocument.body.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.started.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
