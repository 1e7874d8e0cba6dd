package machine

// LaunchDepth is the number of operations that a stream holds before a launch
// waits for space, as in CUDA's driver.
const LaunchDepth = 1024

// AwaitRoom waits until the stream has space for one more operation. Meanwhile no
// other call on the device enters the driver, not even a query, because CUDA
// holds the lock of the context while a launch waits. m.mu is held, except during
// the wait.
func (s *Stream) AwaitRoom() {
	if len(s.queue) < LaunchDepth {
		return
	}
	m, dev := s.dev.m, s.dev
	dev.waiting++
	for len(s.queue) >= LaunchDepth {
		m.room.Wait()
	}
	dev.waiting--
	m.room.Broadcast()
}

// enter waits until no launch on the device waits for space. m.mu is held, except during the wait.
func (m *Machine) enter(dev *Device) {
	for dev != nil && dev.waiting > 0 {
		m.room.Wait()
	}
}
