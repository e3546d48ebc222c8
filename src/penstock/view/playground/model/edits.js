// Changes to a schedule's lists, with a history to go back in.

class Edits {
  /** @param {Schedule} original */
  constructor(original) {
    this.history = [original];
    this.at = 0;
  }

  get current() {
    return this.history[this.at];
  }

  get original() {
    return this.history[0];
  }

  get isEdited() {
    return this.at > 0;
  }

  /** @param {Schedule} schedule */
  apply(schedule) {
    this.history.splice(this.at + 1, Infinity, schedule);
    this.at++;
  }

  undo() {
    if (this.at > 0) this.at--;
  }

  redo() {
    if (this.at + 1 < this.history.length) this.at++;
  }
}

/** Return a schedule with other lists: the same stages on the same ranks. @param {Schedule} schedule @param {Orders} orders */
function withOrders(schedule, orders) {
  return new Schedule(schedule.name, orders, schedule.layout);
}

/**
 * Return a schedule with one work moved; `to.position` counts as if the work were already gone.
 * @param {Schedule} schedule
 * @param {{rank: number, position: number}} from @param {{rank: number, position: number}} to
 */
function moveWork(schedule, from, to) {
  const orders = schedule.orders.map((order) => [...order]);
  const [work] = orders[from.rank].splice(from.position, 1);
  orders[to.rank].splice(to.position, 0, work);
  return withOrders(schedule, orders);
}

/** @param {Schedule} schedule @param {{rank: number, position: number}} place */
function removeWork(schedule, { rank, position }) {
  const orders = schedule.orders.map((order) => [...order]);
  orders[rank].splice(position, 1);
  return withOrders(schedule, orders);
}
