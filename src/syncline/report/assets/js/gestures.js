"use strict";
// Wheel, drag, pinch and keys, as calls of a view. The wheel zooms only if it began to turn over the timeline, so that a
// page that is being scrolled keeps scrolling.
Syncline.gestures = (() => {
  const CALM = 350; // ms without wheel events after which the next one starts a new gesture
  const DRAG = 4; // a press that moves fewer pixels is a click
  let elsewhere = -Infinity;
  window.addEventListener("wheel", (event) => {
    if (!event.target.closest?.(".stage canvas[role=application]")) elsewhere = event.timeStamp;
  }, { passive: true, capture: true });

  // target: {view, plot() -> {left, right}, scroll(dy), hover(x, y), leave(), click(x, y), open(x, y), keys: {key: action}}
  const attach = (canvas, target) => {
    const spot = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const time = (x) => {
      const { left, right } = target.plot();
      const { from, to } = target.view.state;
      return from + ((Math.min(Math.max(x, left), right) - left) / (right - left)) * (to - from);
    };

    canvas.addEventListener("wheel", (event) => {
      if (event.timeStamp - elsewhere < CALM) { elsewhere = event.timeStamp; return; }
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
      const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
      const { left, right } = target.plot();
      if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) target.view.move(((event.shiftKey && !dx ? dy : dx)) / (right - left));
      else target.view.zoom(Math.exp(Math.max(-240, Math.min(240, dy)) * (event.ctrlKey ? 0.008 : 0.0022)), time(spot(event)[0]));
    }, { passive: false });

    const pressed = new Map();
    let moved = 0;
    const apart = () => { const [a, b] = [...pressed.values()]; return Math.max(Math.abs(a[0] - b[0]), 12); };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pressed.set(event.pointerId, spot(event));
      canvas.setPointerCapture(event.pointerId);
      if (pressed.size === 1) moved = 0; else moved = Infinity;
    });
    canvas.addEventListener("pointermove", (event) => {
      const at = spot(event);
      const before = pressed.get(event.pointerId);
      if (!before) { target.hover(...at); return; }
      const { left, right } = target.plot();
      if (pressed.size === 2) {
        const width = apart();
        pressed.set(event.pointerId, at);
        const middle = [...pressed.values()].reduce((sum, [x]) => sum + x / 2, 0);
        target.view.zoom(width / apart(), time(middle));
        target.view.move((before[0] - at[0]) / 2 / (right - left));
        return;
      }
      moved += Math.abs(at[0] - before[0]) + Math.abs(at[1] - before[1]);
      pressed.set(event.pointerId, at);
      if (moved < DRAG) return;
      target.leave();
      canvas.classList.add("dragged");
      target.view.move((before[0] - at[0]) / (right - left));
      if (event.pointerType !== "touch") target.scroll(before[1] - at[1]);
    });
    const release = (event) => {
      if (!pressed.delete(event.pointerId)) return;
      canvas.classList.remove("dragged");
      if (event.type === "pointerup" && pressed.size === 0 && moved < DRAG) target.click(...spot(event));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => target.leave());
    canvas.addEventListener("dblclick", (event) => target.open(...spot(event)));
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = target.keys[event.key] ?? target.keys[event.key.toLowerCase()];
      if (!action || action(event) === false) return;
      event.preventDefault();
    });
  };

  return { attach };
})();
