//go:build !cgo || nonvml

package nvml

func open() (API, error) {
	return nil, &UnsupportedError{Need: "a program built with cgo", Have: "one built without"}
}
