package virtual

// launchDepth is how many operations a stream takes before a launch waits for room, as
// CUDA's driver has it.
const launchDepth = 1024

// awaitRoom waits until the stream has room for one more operation. Nobody else gets into
// the driver with the device's context meanwhile, not even to ask whether something is done:
// CUDA holds the context's lock while a launch waits. m.mu is held, but for the wait.
func (s *stream) awaitRoom() {
	if len(s.queue) < launchDepth {
		return
	}
	m, dev := s.dev.m, s.dev
	dev.waiting++
	for len(s.queue) >= launchDepth {
		m.room.Wait()
	}
	dev.waiting--
	m.room.Broadcast()
}

// enter waits until no launch waits for room on a device. m.mu is held, but for the wait.
func (m *Machine) enter(dev *device) {
	for dev != nil && dev.waiting > 0 {
		m.room.Wait()
	}
}
