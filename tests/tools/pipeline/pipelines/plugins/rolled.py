from plugins import STEPS


def rolled(image):
    return image.transpose(0)


STEPS.append(rolled)
