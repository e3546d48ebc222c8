// The part of the step that all panels show, and its movement.

// The share of the distance that is left after each frame.
const LEFT_PER_FRAME = 0.6;
const WHEEL_SPEED = 0.0016;

class TimeWindow {
  /** `finest` is the smallest number of seconds in the window. */
  constructor(whole, finest, onChange) {
    this.whole = whole;
    this.finest = Math.min(finest, whole);
    this.onChange = onChange;
    this.left = this.goalLeft = 0;
    this.right = this.goalRight = whole;
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)");
  }

  get span() {
    return this.right - this.left;
  }

  get isMoving() {
    return this.left !== this.goalLeft || this.right !== this.goalRight;
  }

  /** Zoom by a factor around a point, given as a share of the width. */
  zoom(factor, share = 0.5) {
    const span = this.goalRight - this.goalLeft;
    const wanted = Math.min(Math.max(span / factor, this.finest), this.whole);
    this.show(this.goalLeft + (span - wanted) * share, wanted);
  }

  wheel(pixels, share) {
    this.zoom(Math.exp(-pixels * WHEEL_SPEED), share);
  }

  /** Move by a share of the visible time. */
  pan(share) {
    const span = this.goalRight - this.goalLeft;
    this.show(this.goalLeft + span * share, span);
  }

  /** Show `span` seconds from `left` on, within the step. */
  show(left, span) {
    this.goalLeft = Math.min(Math.max(left, 0), this.whole - span);
    this.goalRight = this.goalLeft + span;
    this.onChange();
  }

  /** Show the time between two moments, in either order. */
  showBetween(one, other) {
    const [left, right] = [Math.max(0, Math.min(one, other)), Math.min(this.whole, Math.max(one, other))];
    const span = Math.min(Math.max(right - left, this.finest), this.whole);
    this.show(left, span);
  }

  reset() {
    this.show(0, this.whole);
  }

  /** End all movement, so that the view follows a finger directly. */
  jump() {
    [this.left, this.right] = [this.goalLeft, this.goalRight];
    this.onChange();
  }

  /** Move by one frame. Both edges move alike, so that the point under the pointer stays. */
  step() {
    const [left, right] = [this.goalLeft - this.left, this.goalRight - this.right];
    const isNear = Math.abs(left) + Math.abs(right) < (this.goalRight - this.goalLeft) * 1e-3;
    if (isNear || this.isCalm.matches) {
      [this.left, this.right] = [this.goalLeft, this.goalRight];
    } else {
      this.left += left * (1 - LEFT_PER_FRAME);
      this.right += right * (1 - LEFT_PER_FRAME);
    }
  }
}
