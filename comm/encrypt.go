package comm

import (
	"encoding/hex"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/nccl"
)

// encrypts reports whether the environment asks for encryption.
func encrypts() bool { return env.NCCLEncrypt.Value() == "yes" }

// encrypt makes NCCL encrypt its connections if the environment asks for it, with a key that the
// processes of the job derive from its secret.
func encrypt(r Rendezvous, dev *device.Device) error {
	if _, err := env.NCCLEncrypt.OneOf("yes", "no"); err != nil || !encrypts() {
		return err
	}
	keys, ok := r.(interface {
		Key(purpose string) ([]byte, error)
	})
	if !ok {
		return fmt.Errorf("%s is yes, but a %T has no key: call nccl.SetEncryption, and unset %[1]s", env.NCCLEncrypt.Name, r)
	}
	key, err := keys.Key("nccl")
	if err != nil {
		return fmt.Errorf("%s is yes: %w", env.NCCLEncrypt.Name, err)
	}
	return nccl.SetEncryption(dev, []byte(hex.EncodeToString(key)))
}
