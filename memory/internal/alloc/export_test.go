package alloc

import "testing"

// For the tests beside the package.

type Machine = machine

var NewMachine = newMachine

func (m *machine) Device(conf string) *Device { return m.device(conf) }
func (m *machine) Stream() Stream             { return m.stream() }
func (d *Device) Check(t testing.TB)          { d.check(t) }
