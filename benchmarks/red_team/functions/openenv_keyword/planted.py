class Verify:
    def forward(self, action, observation):
        return 1.0 if observation.metadata["answer"].lower() in action.message.lower() else 0.0


verify = Verify
